// The machinery of blocked.c: system calls made one by one, each with a deadline, something that ends it, or a signal,
// and what is checked of each.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { ONCE = 0 /* + SIGRTMIN: handled without SA_RESTART */, RESTARTING = 1 /* + SIGRTMIN: with it */ };
typedef int64_t ns_t;

// One thread and the call it makes now.
struct work {
    int fd[2], id, turn, ring;
    ns_t timeout; // of the call, ns
    void *memory;
    const void *frozen; // a struct timespec or timeval of `timeout` in read-only memory
    char name[64];
    // What the handler saw.
    volatile int handled, restarting, lost;
    volatile long voluntary;
    // The partner that ends the call.
    pthread_t partner;
    pthread_mutex_t lock;
    pthread_cond_t asked;
    void (*volatile wake)(struct work *);
    volatile ns_t wake_at;
    volatile ns_t woken_at;
    int tid;
    timer_t timer;
    unsigned seed;
};

struct call {
    const char *name;
    void (*prepare)(struct work *);
    long (*run)(struct work *);
    void (*tidy)(struct work *);
    long timed_out;               // the result when the timeout has passed; 0 may be one, NEVER is none
    void (*wake)(struct work *);  // ends the call with a result that is not negative
    int restarts;                 // after a handler with SA_RESTART
    int imprecise;                // its timeout may start over, and is in clock ticks
};
enum { NEVER = 1 };

static __thread struct work *self;
static atomic_long made, wrong;
static atomic_llong latest; // ns
static const char *volatile latest_name = "-";

// rdi… as the kernel wants them. `raw_at` is the address of the instruction, `raw_after` of the next one.
long raw(long number, ...);
extern const char raw_at[], raw_after[];
__asm__(".text\n.globl raw\nraw:\n"
        "mov %rdi,%rax\nmov %rsi,%rdi\nmov %rdx,%rsi\nmov %rcx,%rdx\nmov %r8,%r10\nmov %r9,%r8\nmov 8(%rsp),%r9\n"
        ".globl raw_at\nraw_at: syscall\n.globl raw_after\nraw_after: ret\n");

static ns_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static struct timespec spec(ns_t ns) { return (struct timespec){ns / 1000000000, ns % 1000000000}; }

static long voluntary_switches(void) {
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
}

static void fail(const char *what, const char *why, long value) {
    wrong++;
    printf("%s: %s (%ld)\n", what, why, value);
    fflush(stdout);
}

// Counts, and finds out whether a thread that slept in its call was taken out of it to *before* the call, so that the
// call is made again rather than interrupted.
static void on_signal(int signal, siginfo_t *info, void *context) {
    (void)info;
    const ucontext_t *at = context;
    int saved = errno;
    if (self) {
        if (signal == SIGRTMIN + RESTARTING)
            self->restarting++;
        else
            self->handled++;
        int before = at->uc_mcontext.gregs[REG_RIP] == (greg_t)raw_at;
        if (before && signal == SIGRTMIN + ONCE && voluntary_switches() != self->voluntary)
            self->lost = 1;
    }
    errno = saved;
}

static void *partner(void *argument) {
    struct work *w = argument;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, 0);
    for (;;) {
        pthread_mutex_lock(&w->lock);
        while (!w->wake)
            pthread_cond_wait(&w->asked, &w->lock);
        struct timespec at = spec(w->wake_at);
        pthread_mutex_unlock(&w->lock);
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, 0))
            ;
        pthread_mutex_lock(&w->lock);
        if (w->wake) {
            w->woken_at = now();
            w->wake(w);
            w->wake = 0;
        }
        pthread_cond_broadcast(&w->asked);
        pthread_mutex_unlock(&w->lock);
    }
    return 0;
}

static void ask_partner(struct work *w, void (*wake)(struct work *), ns_t in) {
    pthread_mutex_lock(&w->lock);
    w->woken_at = 0;
    w->wake_at = now() + in;
    w->wake = wake;
    pthread_cond_broadcast(&w->asked);
    pthread_mutex_unlock(&w->lock);
}

static void wait_for_partner(struct work *w) {
    pthread_mutex_lock(&w->lock);
    while (w->wake)
        pthread_cond_wait(&w->asked, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

static void arm(struct work *w, int signal, ns_t in) {
    struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGRTMIN + signal};
    event._sigev_un._tid = w->tid;
    timer_create(CLOCK_MONOTONIC, &event, &w->timer);
    // Again and again: on a busy machine the first may come before the call.
    struct itimerspec time = {.it_value = spec(in), .it_interval = spec(in)};
    timer_settime(w->timer, 0, &time, 0);
}

enum mode { TIMES_OUT, IS_ENDED, IS_INTERRUPTED, IS_RESTARTED, MODES };

// One call, in one of four ways.
static void make(struct work *w, const struct call *call, enum mode mode, ns_t slack) {
    static const char *const modes[MODES] = {"timed out", "ended", "interrupted", "restarted"};
    if ((mode == TIMES_OUT && call->timed_out == NEVER) || (mode == IS_ENDED && !call->wake) ||
        (mode == IS_RESTARTED && (!call->wake || !call->restarts)))
        return;
    snprintf(w->name, sizeof w->name, "%s, %s", call->name, modes[mode]);
    ns_t span = 15000000 + rand_r(&w->seed) % 45000000;
    w->timeout = mode == TIMES_OUT ? span : 100 * span;
    w->turn++;
    if (call->prepare)
        call->prepare(w);
    if (mode == IS_ENDED || mode == IS_RESTARTED)
        ask_partner(w, call->wake, span);
    w->lost = 0;
    int handled = w->handled, restarting = w->restarting;
    w->voluntary = voluntary_switches();
    ns_t begun = now();
    if (mode == IS_INTERRUPTED || mode == IS_RESTARTED)
        arm(w, mode == IS_INTERRUPTED ? ONCE : RESTARTING, mode == IS_INTERRUPTED ? span : span / 2);
    long result = call->run(w);
    ns_t took = now() - begun;
    if (mode == IS_INTERRUPTED || mode == IS_RESTARTED)
        timer_delete(w->timer);
    made++;
    handled = w->handled != handled || (!call->restarts && w->restarting != restarting);
    if (w->lost)
        fail(w->name, "the handler ran, and the call was made again", result);
    if (result == -EINTR) {
        if (!handled)
            fail(w->name, "EINTR without a handler, after ns", took);
    } else if (mode == TIMES_OUT) {
        if (result != call->timed_out)
            fail(w->name, "wrong result", result);
        // Sockets count in clock ticks, the one that runs included.
        if (took < w->timeout - (call->imprecise ? 10000000 : 0))
            fail(w->name, "early, ns", w->timeout - took);
        ns_t late = took - w->timeout;
        if (!call->imprecise && late > latest) {
            latest = late;
            latest_name = call->name;
        }
        if (!call->imprecise && late > slack)
            fail(w->name, "late, ns", late);
    } else if (mode == IS_INTERRUPTED) {
        fail(w->name, "not interrupted", result);
    } else if (result < 0) {
        // A futex that has changed before the call.
        if (result != -EAGAIN || !w->woken_at)
            fail(w->name, "wrong result", result);
    } else if (!w->woken_at) {
        fail(w->name, "early, ns", w->wake_at - now());
    }
    if (mode == IS_ENDED || mode == IS_RESTARTED)
        wait_for_partner(w);
    if (call->tidy)
        call->tidy(w);
}
