// cc: -O2 -pthread -D_GNU_SOURCE
// lazystack: a thread whose stack is memory that the program itself fills, by another thread, when it is touched
// (userfaultfd); above and below what the thread uses it is never touched. Both it and the first thread call probe_me until
// a byte comes. Prints "ready", then "calls=N wrong=N filled=N": pages that were filled.
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LENGTH = 1 << 20, PAGE = 4096 };
static atomic_long calls, wrong, filled;
static atomic_int over;
static int faults;

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static void *work(void *argument)
{
    (void)argument;
    for (long i = 0; !over; i++, calls++) {
        wrong += probe_me(i, 1) != i * 1000003 + 1;
        if (i % 50 == 0)
            usleep(1000);
    }
    return NULL;
}

static void *fill(void *argument)
{
    static char page[PAGE] __attribute__((aligned(PAGE)));
    struct uffd_msg message;
    while (read(faults, &message, sizeof message) == sizeof message) {
        unsigned long at = message.arg.pagefault.address & ~(PAGE - 1ul);
        struct uffdio_copy copy = {.dst = at, .src = (unsigned long)page, .len = PAGE};
        filled += ioctl(faults, UFFDIO_COPY, &copy) == 0;
    }
    return argument;
}

int main(void)
{
    faults = syscall(SYS_userfaultfd, O_CLOEXEC);
    char *memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_api api = {.api = UFFD_API};
    struct uffdio_register all = {.range = {(unsigned long)memory, LENGTH}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (faults < 0 || ioctl(faults, UFFDIO_API, &api) || memory == MAP_FAILED || ioctl(faults, UFFDIO_REGISTER, &all))
        return 3;
    pthread_t filler, worker;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, memory, LENGTH / 2);
    pthread_create(&filler, NULL, fill, NULL);
    pthread_create(&worker, &attributes, work, NULL);
    puts("ready");
    fflush(stdout);
    for (struct pollfd input = {0, POLLIN, 0}; poll(&input, 1, 1) <= 0;)
        for (long i = 0; i < 50; i++, calls++)
            wrong += probe_me(i, 2) != i * 1000003 + 2;
    over = 1;
    pthread_join(worker, NULL);
    printf("calls=%ld wrong=%ld filled=%ld\n", calls, wrong, filled);
    return wrong != 0;
}
