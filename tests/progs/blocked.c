// cc: -O1 -pthread
// THREADS HOT SECONDS SLACK_MS [CALL]: threads that block in every kind of system call in turn (blocked_calls.h), each call with a deadline, until
// something ends it, or until a signal comes (or only in those whose name begins with CALL); besides, HOT threads that compute with `probe_me`, and one that sends signals.
// Each call is checked: never early, not later than SLACK_MS, EINTR only when a handler has run, and always then.
// Prints "ready", then one line for everything that is wrong, and at last "calls=N wrong=N late_us=N (CALL) hot=ok".
#include "blocked_calls.h"

static atomic_int stopping;
static atomic_ulong probed;

enum { MOST = 64 };
static struct work works[MOST];
static int threads;
static ns_t slack;
static const char *only = "";

static void *work(void *argument) {
    struct work *w = self = argument;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    pthread_sigmask(SIG_BLOCK, &set, 0);
    w->seed = w->id;
    w->memory = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_mutex_init(&w->lock, 0);
    pthread_cond_init(&w->asked, 0);
    pthread_create(&w->partner, 0, partner, w);
    w->tid = syscall(SYS_gettid);
    for (unsigned at = w->id * 7; !stopping; at++)
        if (!strncmp(calls[at % CALLS].name, only, strlen(only)))
            make(w, &calls[at % CALLS], rand_r(&w->seed) % MODES, slack);
    return 0;
}

__attribute__((noinline)) long probe_me(long a, long b) {
    __asm__ volatile("");
    return a * 3 + b;
}

static atomic_int hot_wrong;

static void *heat(void *argument) {
    (void)argument;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, 0);
    while (!stopping) {
        long sum = 0;
        for (long i = 0; i < 10000; i++)
            sum += probe_me(i, 1);
        if (sum != 3 * 49995000L + 10000)
            hot_wrong = 1;
        probed += 10000;
        usleep(1000);
    }
    return 0;
}

// Signals with a handler, and ignored ones, to a thread at random every 5 ms.
static void *send_signals(void *argument) {
    (void)argument;
    unsigned seed = 1;
    while (!stopping) {
        int tid = works[rand_r(&seed) % threads].tid;
        static const int sent[] = {SIGUSR1, SIGWINCH, SIGURG, SIGPIPE};
        if (tid)
            syscall(SYS_tgkill, getpid(), tid, sent[rand_r(&seed) % 4]);
        usleep(5000);
    }
    return 0;
}

int main(int count, char **arguments) {
    if (count < 5)
        return 2;
    if (count > 5)
        only = arguments[5];
    threads = atoi(arguments[1]);
    int hot = atoi(arguments[2]);
    slack = atoi(arguments[4]) * 1000000LL;
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    sigaction(SIGUSR1, &action, 0);
    sigaction(SIGRTMIN + ONCE, &action, 0);
    action.sa_flags |= SA_RESTART;
    sigaction(SIGRTMIN + RESTARTING, &action, 0);
    signal(SIGPIPE, SIG_IGN);
    pthread_t started[MOST], heated[MOST], signals;
    for (int i = 0; i < threads; i++) {
        works[i].id = i;
        pthread_create(&started[i], 0, work, &works[i]);
    }
    for (int i = 0; i < hot; i++)
        pthread_create(&heated[i], 0, heat, 0);
    pthread_create(&signals, 0, send_signals, 0);
    puts("ready");
    fflush(stdout);
    ns_t end = now() + atoi(arguments[3]) * 1000000000LL;
    struct pollfd input = {0, POLLIN, 0};
    while (now() < end && poll(&input, 1, 100) <= 0)
        ;
    stopping = 1;
    pthread_join(signals, 0);
    for (int i = 0; i < threads; i++)
        pthread_join(started[i], 0);
    for (int i = 0; i < hot; i++)
        pthread_join(heated[i], 0);
    printf("calls=%ld wrong=%ld late_us=%lld (%s) hot=%s\n", made, wrong, latest / 1000, latest_name,
           hot_wrong ? "wrong" : "ok");
    return 0;
}
