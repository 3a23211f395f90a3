// cc: -O2 -pthread -D_GNU_SOURCE
// workers: a program that has threads which the kernel made for it (io_uring: one that polls for requests, one that does a
// blocking read), while a thread of its own waits for the read and the first calls probe_me. When a byte comes the read gets
// its byte, too. Prints "ready", then "calls=N wrong=N workers=N": the last is how many of those threads there were.
#include <dirent.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static long calls, wrong;
static int ring, ends[2];

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static void *wait_for_read(void *argument)
{
    // Nothing that happens to this thread is a reason for this call to end.
    return (void *)(syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0 ? argument : NULL);
}

static int threads(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/task");
    for (struct dirent *entry; folder && (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count;
}

int main(void)
{
    static char byte;
    struct io_uring_params polled = {.flags = IORING_SETUP_SQPOLL, .sq_thread_idle = 100}, params = {0};
    int other = syscall(SYS_io_uring_setup, 8, &polled);
    ring = syscall(SYS_io_uring_setup, 8, &params);
    if (other < 0 || ring < 0 || pipe(ends))
        return 3;
    char *queue = mmap(NULL, params.sq_off.array + params.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entry = mmap(NULL, params.sq_entries * sizeof *entry, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
    if (queue == MAP_FAILED || entry == MAP_FAILED)
        return 4;
    *entry = (struct io_uring_sqe){.opcode = IORING_OP_READ, .flags = IOSQE_ASYNC, .fd = ends[0], .addr = (uintptr_t)&byte, .len = 1, .off = -1};
    *(unsigned *)(queue + params.sq_off.array) = 0;
    atomic_store((_Atomic unsigned *)(queue + params.sq_off.tail), 1);
    if (syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0) != 1)
        return 5;
    pthread_t waiting;
    pthread_create(&waiting, NULL, wait_for_read, ends);
    usleep(20000);
    int workers = threads() - 2;
    puts("ready");
    fflush(stdout);
    for (struct pollfd input = {0, POLLIN, 0}; poll(&input, 1, 1) <= 0;)
        for (long i = 0; i < 50; i++, calls++)
            wrong += probe_me(calls, i) != calls * 1000003 + i;
    void *failed = NULL;
    wrong += write(ends[1], "x", 1) != 1;
    pthread_join(waiting, &failed);
    wrong += failed != NULL || byte != 'x';
    printf("calls=%ld wrong=%ld workers=%d\n", calls, wrong, workers);
    return wrong != 0;
}
