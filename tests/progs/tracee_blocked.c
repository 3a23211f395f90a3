// cc: -O1 -pthread
// Threads that block in one system call each, for good: those that the kernel restarts after a stop, and those that
// it ends with EINTR. Prints "ready", waits for a byte, prints "NAME returned" for every call that came back, "done".
#define _GNU_SOURCE
#include <errno.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/sem.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const struct timespec LONG = {600, 0};
static const struct timeval LONG_SOCKET = {600, 0};

static int quiet_socket(void) {
    int pair[2];
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &LONG_SOCKET, sizeof LONG_SOCKET);
    return pair[0];
}

static void epoll_(void) {
    struct epoll_event event;
    epoll_wait(epoll_create1(0), &event, 1, 600000);
}

static void epoll_masked(void) {
    struct epoll_event event;
    sigset_t none;
    sigemptyset(&none);
    epoll_pwait(epoll_create1(0), &event, 1, -1, &none);
}

static void recv_timeout(void) {
    char byte;
    recv(quiet_socket(), &byte, 1, 0);
}

static void read_timeout(void) {
    char byte;
    if (read(quiet_socket(), &byte, 1) < 0)
        return;
}

static void recv_plain(void) {
    int pair[2];
    char byte;
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    recv(pair[0], &byte, 1, 0);
}

static void accept_timeout(void) {
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &LONG_SOCKET, sizeof LONG_SOCKET);
    bind(fd, &(struct sockaddr){AF_UNIX, ""}, sizeof(sa_family_t));
    listen(fd, 1);
    accept(fd, 0, 0);
}

static int semaphores = -1;

static void semaphore(void) {
    struct sembuf down = {0, -1, 0};
    semaphores = semget(IPC_PRIVATE, 1, 0600);
    semtimedop(semaphores, &down, 1, &LONG);
}

static void signal_wait(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigtimedwait(&set, 0, &LONG);
}

static void aio(void) {
    aio_context_t context = 0;
    struct io_event event;
    syscall(SYS_io_setup, 1, &context);
    syscall(SYS_io_getevents, context, 1, 1, &event, &LONG);
}

static void sleeping(void) { nanosleep(&LONG, 0); }

static void futex(void) {
    static int word = 1;
    syscall(SYS_futex, &word, FUTEX_WAIT, 1, &LONG, 0, 0);
}

static void polling(void) { poll(0, 0, 600000); }

static void selecting(void) {
    struct timeval time = LONG_SOCKET;
    select(0, 0, 0, 0, &time);
}

static void pausing(void) { pause(); }

static const struct call {
    const char *name;
    void (*run)(void);
} calls[] = {
    {"epoll_wait", epoll_},       {"epoll_pwait", epoll_masked},  {"recv+timeout", recv_timeout},
    {"read+timeout", read_timeout}, {"recv", recv_plain},         {"accept+timeout", accept_timeout},
    {"semtimedop", semaphore},    {"sigtimedwait", signal_wait},  {"io_getevents", aio},
    {"nanosleep", sleeping},      {"futex", futex},               {"poll", polling},
    {"select", selecting},        {"pause", pausing},
};
enum { CALLS = sizeof calls / sizeof *calls };
static atomic_int returned[CALLS];

static void *block(void *which) {
    const struct call *call = which;
    call->run();
    returned[call - calls] = 1;
    return 0;
}

int main(void) {
    pthread_t thread;
    for (int i = 0; i < CALLS; i++)
        pthread_create(&thread, 0, block, (void *)&calls[i]);
    usleep(100000);
    puts("ready");
    fflush(stdout);
    getchar();
    for (int i = 0; i < CALLS; i++)
        if (returned[i])
            printf("%s returned\n", calls[i].name);
    puts("done");
    fflush(stdout);
    semctl(semaphores, 0, IPC_RMID); // would outlive us
    return 0;
}
