// The system calls that blocked.c makes: what each waits on, how it is made, what ends it, and the table of them all.
#include "blocked.h"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <mqueue.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/msg.h>
#include <sys/sem.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <sys/wait.h>

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

// ---- what is waited on

static void make_pipe(struct work *w) { (void)!pipe(w->fd); }
static void make_pair(struct work *w) { (void)!socketpair(AF_UNIX, SOCK_STREAM, 0, w->fd); }
static void close_both(struct work *w) {
    close(w->fd[0]);
    close(w->fd[1]);
}
static void write_one(struct work *w) { (void)!write(w->fd[1], "x", 1); }
static void read_all(struct work *w) {
    char bytes[4096];
    int flags = fcntl(w->fd[0], F_GETFL);
    fcntl(w->fd[0], F_SETFL, flags | O_NONBLOCK);
    while (read(w->fd[0], bytes, sizeof bytes) > 0)
        ;
    fcntl(w->fd[0], F_SETFL, flags);
}
static void fill(int fd) {
    char bytes[4096] = {0};
    int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
    while (write(fd, bytes, sizeof bytes) > 0 || write(fd, bytes, 1) > 0)
        ;
    fcntl(fd, F_SETFL, flags);
}
static void make_full_pipe(struct work *w) {
    make_pipe(w);
    fill(w->fd[1]);
}
static void make_full_pair(struct work *w) {
    make_pair(w);
    fill(w->fd[1]);
}
static struct timeval socket_time(struct work *w) {
    return (struct timeval){w->timeout / 1000000000, w->timeout % 1000000000 / 1000};
}
static void make_timed_pair(struct work *w) {
    make_pair(w);
    struct timeval time = socket_time(w);
    w->timeout = (time.tv_sec * 1000000LL + time.tv_usec) * 1000;
    setsockopt(w->fd[0], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
}
static void address(struct work *w, struct sockaddr_un *at) {
    *at = (struct sockaddr_un){.sun_family = AF_UNIX};
    // A name of its own: the socket of the last may live on in a child.
    snprintf(at->sun_path + 1, sizeof at->sun_path - 1, "blocked-%d-%d-%d", getpid(), w->id, w->turn);
}
static void make_listener(struct work *w) {
    struct sockaddr_un at;
    address(w, &at);
    w->fd[0] = socket(AF_UNIX, SOCK_STREAM, 0);
    w->fd[1] = -1;
    bind(w->fd[0], (struct sockaddr *)&at, sizeof at);
    listen(w->fd[0], 0);
}
static void connect_once(struct work *w) {
    struct sockaddr_un at;
    address(w, &at);
    w->fd[1] = socket(AF_UNIX, SOCK_STREAM, 0);
    connect(w->fd[1], (struct sockaddr *)&at, sizeof at);
}
static void make_full_listener(struct work *w) {
    make_listener(w);
    connect_once(w);
}
static void accept_once(struct work *w) { close(accept(w->fd[0], 0, 0)); }
static void make_epoll(struct work *w) {
    w->fd[0] = epoll_create1(0);
    w->fd[1] = eventfd(0, 0);
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(w->fd[0], EPOLL_CTL_ADD, w->fd[1], &event);
}
static void make_eventfd(struct work *w) {
    w->fd[0] = eventfd(0, 0);
    w->fd[1] = dup(w->fd[0]);
}
static void signal_eventfd(struct work *w) { eventfd_write(w->fd[1], 1); }
static void whole_ms(struct work *w) { w->timeout -= w->timeout % 1000000; }
static void make_epoll_ms(struct work *w) {
    whole_ms(w);
    make_epoll(w);
}

// ---- the calls

static long in_nanosleep(struct work *w) {
    struct timespec t = spec(w->timeout);
    return raw(SYS_nanosleep, &t, 0L);
}
static long in_clock_nanosleep(struct work *w) {
    struct timespec t = spec(w->timeout);
    return raw(SYS_clock_nanosleep, (long)CLOCK_MONOTONIC, 0L, &t, 0L);
}
static long in_clock_nanosleep_until(struct work *w) {
    struct timespec t = spec(now() + w->timeout);
    return raw(SYS_clock_nanosleep, (long)CLOCK_MONOTONIC, (long)TIMER_ABSTIME, &t, 0L);
}
static long in_poll(struct work *w) {
    struct pollfd fd = {w->fd[0], POLLIN, 0};
    return raw(SYS_poll, &fd, 1L, (long)(w->timeout / 1000000));
}
static void make_poll(struct work *w) {
    whole_ms(w);
    make_eventfd(w);
}
static long in_ppoll(struct work *w) {
    struct pollfd fd = {w->fd[0], POLLIN, 0};
    struct timespec t = spec(w->timeout);
    return raw(SYS_ppoll, &fd, 1L, &t, 0L, 8L);
}
static void freeze(struct work *w) {
    mprotect(w->memory, 4096, PROT_READ | PROT_WRITE);
    *(struct timespec *)w->memory = spec(w->timeout);
    mprotect(w->memory, 4096, PROT_READ);
    make_eventfd(w);
}
static long in_ppoll_frozen(struct work *w) {
    struct pollfd fd = {w->fd[0], POLLIN, 0};
    return raw(SYS_ppoll, &fd, 1L, w->memory, 0L, 8L);
}
static long in_pselect_frozen(struct work *w) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(w->fd[0], &set);
    return raw(SYS_pselect6, w->fd[0] + 1L, &set, 0L, 0L, w->memory, 0L);
}
static long in_select(struct work *w) {
    fd_set set;
    FD_ZERO(&set);
    FD_SET(w->fd[0], &set);
    struct timeval t = {w->timeout / 1000000000, w->timeout % 1000000000 / 1000};
    return raw(SYS_select, w->fd[0] + 1L, &set, 0L, 0L, &t);
}
static void make_select(struct work *w) {
    w->timeout -= w->timeout % 1000;
    make_eventfd(w);
}
static long in_epoll_wait(struct work *w) {
    struct epoll_event event;
    return raw(SYS_epoll_wait, (long)w->fd[0], &event, 1L, (long)(w->timeout / 1000000));
}
static long in_epoll_pwait(struct work *w) {
    struct epoll_event event;
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, 0, &mask);
    return raw(SYS_epoll_pwait, (long)w->fd[0], &event, 1L, (long)(w->timeout / 1000000), &mask, 8L);
}
static long in_epoll_pwait2(struct work *w) {
    struct epoll_event event;
    struct timespec t = spec(w->timeout);
    return raw(SYS_epoll_pwait2, (long)w->fd[0], &event, 1L, &t, 0L, 8L);
}
static long in_epoll_for_good(struct work *w) {
    struct epoll_event event;
    return raw(SYS_epoll_wait, (long)w->fd[0], &event, 1L, -1L);
}
static long in_read(struct work *w) {
    char bytes[64];
    return raw(SYS_read, (long)w->fd[0], bytes, (long)sizeof bytes);
}
static long in_write(struct work *w) { return raw(SYS_write, (long)w->fd[1], "x", 1L); }
static long in_recv(struct work *w) {
    char byte;
    return raw(SYS_recvfrom, (long)w->fd[0], &byte, 1L, 0L, 0L, 0L);
}
static long in_recvmsg(struct work *w) {
    char byte;
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    return raw(SYS_recvmsg, (long)w->fd[0], &message, 0L);
}
static long in_send(struct work *w) { return raw(SYS_sendto, (long)w->fd[1], "x", 1L, 0L, 0L, 0L); }
static long in_accept(struct work *w) {
    long got = raw(SYS_accept4, (long)w->fd[0], 0L, 0L, 0L);
    if (got >= 0)
        close(got);
    return got;
}
static void make_timed_listener(struct work *w) {
    make_listener(w);
    struct timeval time = socket_time(w);
    w->timeout = (time.tv_sec * 1000000LL + time.tv_usec) * 1000;
    setsockopt(w->fd[0], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time);
}
static long connect_with(struct work *w, int timed) {
    struct sockaddr_un at;
    address(w, &at);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct timeval time = socket_time(w);
    if (timed) {
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
        w->timeout = (time.tv_sec * 1000000LL + time.tv_usec) * 1000;
    }
    long done = raw(SYS_connect, (long)fd, &at, (long)sizeof at);
    close(fd);
    return done;
}
static long in_connect(struct work *w) { return connect_with(w, 0); }
static long in_timed_connect(struct work *w) { return connect_with(w, 1); }

static void make_word(struct work *w) { *(volatile int *)((char *)w->memory + 4096) = 0; }
static int *word(struct work *w) { return (int *)((char *)w->memory + 4096); }
static void wake_word(struct work *w) {
    __atomic_store_n(word(w), 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word(w), FUTEX_WAKE, 1, 0, 0, 0);
}
static long in_futex(struct work *w) {
    struct timespec t = spec(w->timeout);
    return raw(SYS_futex, word(w), (long)FUTEX_WAIT, 0L, &t, 0L, 0L);
}
static long in_futex_until(struct work *w) {
    struct timespec t = spec(now() + w->timeout);
    return raw(SYS_futex, word(w), (long)FUTEX_WAIT_BITSET, 0L, &t, 0L, 0xffffffffL);
}
static long in_futex_for_good(struct work *w) { return raw(SYS_futex, word(w), (long)FUTEX_WAIT, 0L, 0L, 0L, 0L); }
static long in_futex_waitv(struct work *w) {
    struct timespec t = spec(now() + w->timeout);
    struct {
        uint64_t value, address;
        uint32_t flags, reserved;
    } wait = {0, (uint64_t)word(w), 2, 0};
    return raw(SYS_futex_waitv, &wait, 1L, 0L, &t, (long)CLOCK_MONOTONIC);
}

static void make_semaphore(struct work *w) { w->fd[0] = semget(IPC_PRIVATE, 1, 0600); }
static void remove_semaphore(struct work *w) { semctl(w->fd[0], 0, IPC_RMID); }
static void up(struct work *w) {
    struct sembuf one = {0, 1, 0};
    semop(w->fd[0], &one, 1);
}
static long in_semtimedop(struct work *w) {
    struct sembuf down = {0, -1, 0};
    struct timespec t = spec(w->timeout);
    return raw(SYS_semtimedop, (long)w->fd[0], &down, 1L, &t);
}
static long in_semop(struct work *w) {
    struct sembuf down = {0, -1, 0};
    return raw(SYS_semop, (long)w->fd[0], &down, 1L);
}

struct message {
    long type;
    char bytes[8];
};
static void make_queue(struct work *w) { w->fd[0] = msgget(IPC_PRIVATE, 0600); }
static void make_full_queue(struct work *w) {
    make_queue(w);
    struct msqid_ds set;
    msgctl(w->fd[0], IPC_STAT, &set);
    set.msg_qbytes = 8;
    msgctl(w->fd[0], IPC_SET, &set);
    msgsnd(w->fd[0], &(struct message){1, ""}, 8, 0);
}
static void remove_queue(struct work *w) { msgctl(w->fd[0], IPC_RMID, 0); }
static void send_message(struct work *w) { msgsnd(w->fd[0], &(struct message){1, ""}, 8, 0); }
static void take_message(struct work *w) {
    struct message m;
    msgrcv(w->fd[0], &m, 8, 0, 0);
}
static long in_msgrcv(struct work *w) {
    struct message m;
    return raw(SYS_msgrcv, (long)w->fd[0], &m, 8L, 0L, 0L);
}
static long in_msgsnd(struct work *w) {
    struct message m = {1, ""};
    return raw(SYS_msgsnd, (long)w->fd[0], &m, 8L, 0L);
}

static void make_mq(struct work *w) {
    char name[64];
    snprintf(name, sizeof name, "/blocked-%d-%d", getpid(), w->id);
    struct mq_attr attributes = {.mq_maxmsg = 1, .mq_msgsize = 8};
    w->fd[0] = mq_open(name, O_RDWR | O_CREAT, 0600, &attributes);
    w->fd[1] = dup(w->fd[0]);
    mq_unlink(name);
}
static void send_mq(struct work *w) { mq_send(w->fd[1], "x", 1, 0); }
static long in_mq_timedreceive(struct work *w) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t = spec(t.tv_sec * 1000000000LL + t.tv_nsec + w->timeout);
    char bytes[8];
    return raw(SYS_mq_timedreceive, (long)w->fd[0], bytes, 8L, 0L, &t);
}

static void send_signal(struct work *w) { syscall(SYS_tgkill, getpid(), w->tid, SIGUSR2); }
static void take_signal(struct work *w) {
    (void)w;
    uint64_t set = 1ULL << (SIGUSR2 - 1);
    struct timespec none = {0};
    syscall(SYS_rt_sigtimedwait, &set, 0, &none, 8);
}
static long in_sigtimedwait(struct work *w) {
    uint64_t set = 1ULL << (SIGUSR2 - 1);
    struct timespec t = spec(w->timeout);
    return raw(SYS_rt_sigtimedwait, &set, 0L, &t, 8L);
}
static long in_sigwait(struct work *w) {
    (void)w;
    uint64_t set = 1ULL << (SIGUSR2 - 1);
    return raw(SYS_rt_sigtimedwait, &set, 0L, 0L, 8L);
}
static long in_sigsuspend(struct work *w) {
    (void)w;
    uint64_t set = 1ULL << (SIGUSR2 - 1);
    return raw(SYS_rt_sigsuspend, &set, 8L);
}
static long in_pause(struct work *w) {
    (void)w;
    return raw(SYS_pause);
}

static void make_aio(struct work *w) {
    aio_context_t context = 0;
    syscall(SYS_io_setup, 8, &context);
    *(aio_context_t *)word(w) = context;
}
static void remove_aio(struct work *w) { syscall(SYS_io_destroy, *(aio_context_t *)word(w)); }
static long in_io_getevents(struct work *w) {
    struct io_event event;
    struct timespec t = spec(w->timeout);
    return raw(SYS_io_getevents, (long)*(aio_context_t *)word(w), 1L, 1L, &event, &t);
}
static void make_uring(struct work *w) {
    // One for good: the kernel ends the calls of threads whose ring is closed, with EINTR, when it is done with that.
    struct io_uring_params params = {0};
    if (!w->ring)
        w->ring = syscall(SYS_io_uring_setup, 2, &params);
}
static long in_io_uring_enter(struct work *w) {
    struct timespec t = spec(w->timeout);
    struct io_uring_getevents_arg argument = {.ts = (uint64_t)&t};
    long flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    return raw(SYS_io_uring_enter, (long)w->ring, 0L, 1L, flags, &argument, (long)sizeof argument);
}

static void make_locked(struct work *w) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", w->fd[0] = memfd_create("lock", 0));
    w->fd[1] = open(path, O_RDWR);
}
static void make_flocked(struct work *w) {
    make_locked(w);
    flock(w->fd[1], LOCK_EX);
}
static void unlock(struct work *w) { flock(w->fd[1], LOCK_UN); }
static long in_flock(struct work *w) { return raw(SYS_flock, (long)w->fd[0], (long)LOCK_EX); }
static const struct flock WHOLE = {.l_type = F_WRLCK}, NOTHING = {.l_type = F_UNLCK};
static void make_range_locked(struct work *w) {
    make_locked(w);
    fcntl(w->fd[1], F_OFD_SETLK, &WHOLE);
}
static void unlock_range(struct work *w) { fcntl(w->fd[1], F_OFD_SETLK, &NOTHING); }
static long in_fcntl(struct work *w) { return raw(SYS_fcntl, (long)w->fd[0], (long)F_OFD_SETLKW, &WHOLE); }

static int child(void *argument) {
    (void)argument;
    for (;;)
        pause();
    return 0;
}
static void make_child(struct work *w) {
    static __thread char stack[16384];
    // Without SIGCHLD: one that is ignored by default still wakes a thread while its process is traced.
    w->fd[0] = clone(child, stack + sizeof stack, 0, 0);
}
static long in_wait4(struct work *w) { return raw(SYS_wait4, (long)w->fd[0], 0L, (long)__WALL, 0L); }
static long in_waitid(struct work *w) {
    return raw(SYS_waitid, (long)P_PID, (long)w->fd[0], 0L, (long)(WEXITED | WNOWAIT | __WALL), 0L);
}
static void reap(struct work *w) {
    if (waitpid(w->fd[0], 0, WNOHANG | __WALL) == 0) {
        kill(w->fd[0], SIGKILL);
        waitpid(w->fd[0], 0, __WALL);
    }
}
static void end_child(struct work *w) { kill(w->fd[0], SIGKILL); }

static void make_inotify(struct work *w) {
    w->fd[0] = inotify_init();
    char path[64];
    snprintf(path, sizeof path, "/tmp/blocked-%d-%d", getpid(), w->id);
    w->fd[1] = open(path, O_RDWR | O_CREAT, 0600);
    inotify_add_watch(w->fd[0], path, IN_MODIFY);
    unlink(path);
}
static void make_terminal(struct work *w) {
    w->fd[1] = posix_openpt(O_RDWR | O_NOCTTY);
    grantpt(w->fd[1]);
    unlockpt(w->fd[1]);
    w->fd[0] = open(ptsname(w->fd[1]), O_RDWR | O_NOCTTY);
}
static void type_line(struct work *w) { (void)!write(w->fd[1], "x\n", 2); }
static void make_timerfd(struct work *w) {
    w->fd[0] = timerfd_create(CLOCK_MONOTONIC, 0);
    w->fd[1] = -1;
}
static long in_timerfd(struct work *w) {
    struct itimerspec time = {.it_value = spec(w->timeout)};
    timerfd_settime(w->fd[0], 0, &time, 0);
    return in_read(w);
}

static const struct call calls[] = {
    {"nanosleep", 0, in_nanosleep, 0, 0, 0, 0, 0},
    {"clock_nanosleep", 0, in_clock_nanosleep, 0, 0, 0, 0, 0},
    {"clock_nanosleep until", 0, in_clock_nanosleep_until, 0, 0, 0, 0, 0},
    {"poll", make_poll, in_poll, close_both, 0, signal_eventfd, 0, 0},
    {"ppoll", make_eventfd, in_ppoll, close_both, 0, signal_eventfd, 0, 0},
    {"ppoll, frozen", freeze, in_ppoll_frozen, close_both, 0, signal_eventfd, 0, 0},
    {"pselect, frozen", freeze, in_pselect_frozen, close_both, 0, signal_eventfd, 0, 0},
    {"select", make_select, in_select, close_both, 0, signal_eventfd, 0, 0},
    {"epoll_wait", make_epoll_ms, in_epoll_wait, close_both, 0, signal_eventfd, 0, 0},
    {"epoll_pwait", make_epoll_ms, in_epoll_pwait, close_both, 0, signal_eventfd, 0, 0},
    {"epoll_pwait2", make_epoll, in_epoll_pwait2, close_both, 0, signal_eventfd, 0, 0},
    {"epoll_wait for good", make_epoll, in_epoll_for_good, close_both, NEVER, signal_eventfd, 0, 0},
    {"read of a pipe", make_pipe, in_read, close_both, NEVER, write_one, 1, 0},
    {"read of an eventfd", make_eventfd, in_read, close_both, NEVER, signal_eventfd, 1, 0},
    {"read of inotify", make_inotify, in_read, close_both, NEVER, write_one, 1, 0},
    {"read of a terminal", make_terminal, in_read, close_both, NEVER, type_line, 1, 0},
    {"read of a timerfd", make_timerfd, in_timerfd, close_both, 8, 0, 0, 0},
    {"write to a pipe", make_full_pipe, in_write, close_both, NEVER, read_all, 1, 0},
    {"recv", make_pair, in_recv, close_both, NEVER, write_one, 1, 0},
    {"recvmsg", make_pair, in_recvmsg, close_both, NEVER, write_one, 1, 0},
    {"recv with SO_RCVTIMEO", make_timed_pair, in_recv, close_both, -EAGAIN, write_one, 0, 1},
    {"read with SO_RCVTIMEO", make_timed_pair, in_read, close_both, -EAGAIN, write_one, 0, 1},
    {"send", make_full_pair, in_send, close_both, NEVER, read_all, 1, 0},
    {"accept", make_listener, in_accept, close_both, NEVER, connect_once, 1, 0},
    {"accept with SO_RCVTIMEO", make_timed_listener, in_accept, close_both, -EAGAIN, connect_once, 0, 1},
    {"connect", make_full_listener, in_connect, close_both, NEVER, accept_once, 1, 0},
    {"connect with SO_SNDTIMEO", make_full_listener, in_timed_connect, close_both, -EAGAIN, accept_once, 0, 1},
    {"futex", make_word, in_futex, 0, -ETIMEDOUT, wake_word, 0, 0},
    {"futex until", make_word, in_futex_until, 0, -ETIMEDOUT, wake_word, 0, 0},
    {"futex for good", make_word, in_futex_for_good, 0, NEVER, wake_word, 1, 0},
    {"futex_waitv", make_word, in_futex_waitv, 0, -ETIMEDOUT, wake_word, 0, 0},
    {"semtimedop", make_semaphore, in_semtimedop, remove_semaphore, -EAGAIN, up, 0, 0},
    {"semop", make_semaphore, in_semop, remove_semaphore, NEVER, up, 0, 0},
    {"msgrcv", make_queue, in_msgrcv, remove_queue, NEVER, send_message, 0, 0},
    {"msgsnd", make_full_queue, in_msgsnd, remove_queue, NEVER, take_message, 0, 0},
    {"mq_timedreceive", make_mq, in_mq_timedreceive, close_both, -ETIMEDOUT, send_mq, 1, 0},
    {"sigtimedwait", 0, in_sigtimedwait, take_signal, -EAGAIN, send_signal, 0, 0},
    {"sigwaitinfo", 0, in_sigwait, take_signal, NEVER, send_signal, 0, 0},
    {"sigsuspend", 0, in_sigsuspend, 0, NEVER, 0, 0, 0},
    {"pause", 0, in_pause, 0, NEVER, 0, 0, 0},
    {"io_getevents", make_aio, in_io_getevents, remove_aio, 0, 0, 0, 0},
    {"io_uring_enter", make_uring, in_io_uring_enter, 0, -ETIME, 0, 0, 0},
    {"flock", make_flocked, in_flock, close_both, NEVER, unlock, 1, 0},
    {"fcntl", make_range_locked, in_fcntl, close_both, NEVER, unlock_range, 1, 0},
    {"wait4", make_child, in_wait4, reap, NEVER, end_child, 1, 0},
    {"waitid", make_child, in_waitid, reap, NEVER, end_child, 1, 0},
};
enum { CALLS = sizeof calls / sizeof *calls };
