// cc: -O1 -D_GNU_SOURCE -pthread
// tracee_loads MODE LIMIT: a gated load through bad pointers, as a stub has it, over and over. MODE: what it does on
// SIGSEGV: default, ignore, block, handler, both (block, with a handler); with "late" in front, after 50 loads, with a
// pause of 100 ms before the next load; undo: ignores it, and goes back to the default so late; thread: default, but so late
// a new thread makes the loads. Prints "ready LOAD END FIXUP FD" (FD: a memfd; the gate word is at 0x80 of
// its page, the value of an open gate at 0x88). Runs until a byte comes, or LIMIT loads. Prints
// "loads=N closed=N handled=N wrong=N segv=WHAT trap=WHAT blocked=N".
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

extern char load[], load_end[], load_fixup[], own_load[], own_load_end[];
// 0: the gate was closed; 1: loaded and fixed up; 2: loaded a value.
int gated_load(const volatile unsigned *gate, unsigned value, const void *bad);
int own_fault(const void *bad);
__asm__(".text\ngated_load: xor %eax,%eax\ncmp %esi,(%rdi)\njne 1f\nmov $1,%eax\nload: mov (%rdx),%rcx\nload_end: mov $2,%eax\n"
        "load_fixup: nop\n1: ret\n"
        "own_fault: xor %eax,%eax\nown_load: mov (%rdi),%rcx\nown_load_end: inc %eax\nret\n");

static volatile long handled, strange;

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *rip = &((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    (void)info;
    handled++;
    if (signal != SIGSEGV || *rip != (greg_t)own_load)
        strange++;
    *rip = (greg_t)own_load_end;
}

static const char *disposition(int signal) {
    struct sigaction action;
    sigaction(signal, 0, &action);
    return action.sa_handler == SIG_IGN ? "ignored" : action.sa_handler == SIG_DFL ? "default" : "handler";
}

static int faults_itself;
static long limit, loads, closed, own, wrong;
static volatile unsigned *page;

static void set_up(const char *what) {
    sigset_t set;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigemptyset(&set);
    sigaddset(&set, SIGSEGV);
    if (!strcmp(what, "ignore") || !strcmp(what, "undo"))
        signal(SIGSEGV, SIG_IGN);
    if (!strcmp(what, "block") || !strcmp(what, "both"))
        sigprocmask(SIG_BLOCK, &set, 0);
    if (!strcmp(what, "handler") || !strcmp(what, "both"))
        sigaction(SIGSEGV, &action, 0);
    faults_itself = !strcmp(what, "handler");
}

static int blocked;

static void *work(void *until) {
    sigset_t set;
    struct pollfd input = {0, POLLIN, 0};
    while ((!limit || loads < limit) && !poll(&input, 1, 1) && (!until || loads < 50))
        for (int i = 0; i < 10; i++) {
            int got = gated_load(page + 32, page[34], (void *)(i & 1 ? 16 : 0xdead00000000beef));
            loads += got == 1;
            closed += got == 0;
            wrong += got == 2;
            if (faults_itself) {
                wrong += own_fault((void *)32) != 1;
                own++;
            }
        }
    sigprocmask(SIG_BLOCK, 0, &set);
    blocked = sigismember(&set, SIGSEGV);
    return 0;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "default";
    int late = !strncmp(what, "late", 4), undo = !strcmp(what, "undo"), thread = !strcmp(what, "thread");
    limit = argc > 2 ? atol(argv[2]) : 0;
    int fd = memfd_create("gate", 0);
    if (ftruncate(fd, 4096))
        return 2;
    page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    page[34] = 1; // closed until somebody says otherwise
    signal(SIGTRAP, SIG_IGN);
    if (!late)
        set_up(what);
    printf("ready %lx %lx %lx %d\n", (long)load, (long)load_end, (long)load_fixup, fd);
    fflush(stdout);
    if (late || undo || thread) {
        work("50 loads");
        if (late)
            set_up(what + 4);
        if (undo)
            signal(SIGSEGV, SIG_DFL);
        usleep(undo ? 400000 : 100000);
    }
    pthread_t worker;
    if (thread && !pthread_create(&worker, 0, work, 0))
        pthread_join(worker, 0);
    else
        work(0);
    printf("loads=%ld closed=%ld handled=%s wrong=%ld segv=%s trap=%s blocked=%d\n", loads, closed,
           handled == own && !strange ? "own" : "others", wrong, disposition(SIGSEGV), disposition(SIGTRAP), blocked);
    return wrong != 0;
}
