// cc: -O2 -pthread
// Checks that a probe leaves a program's state alone: it runs every site of keep_sites.h with all general registers,
// flags (all 64 combinations, DF set and clear), vector registers, the red zone and errno filled with known patterns,
// and compares all of it afterwards with what the same site did before any probe was there.
//
//     keep THREADS [signals]
//
// With "signals" each thread is also interrupted all the time by a handler that calls the same sites.
// Output: "ready"; after a byte on stdin it checks until stdin ends, then prints a line "NAME CALLS" for each site and
// at last "failures=N". The first failures are told on stderr. Exit code 1 if there were any.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { GPRS = 15, RED_WORDS = 16, PATTERNS = 128, MAX_THREADS = 16 };

// rax rbx rcx rdx rsi rdi rbp r8..r15, in this order; the offsets are known to run_site below.
struct state {
    uint64_t gpr[GPRS];
    uint64_t flags;
    uint64_t red[RED_WORDS];
    uint8_t xmm[16][16];
    uint32_t mxcsr, error;
};

_Static_assert(offsetof(struct state, flags) == 120 && offsetof(struct state, red) == 128 &&
                   offsetof(struct state, xmm) == 256 && offsetof(struct state, mxcsr) == 512,
               "run_site knows these");

uint64_t keep_data = 5;

#define SITE(name, code)                                                                                               \
    __asm__(".text\n.p2align 5\n.globl site_" #name "\n.type site_" #name ",@function\nsite_" #name ": " code          \
            "\n.size site_" #name ",.-site_" #name);
#include "keep_sites.h"
#undef SITE

#define SITE(name, code) void site_##name(void);
#include "keep_sites.h"
#undef SITE

static const struct {
    const char *name;
    void (*code)(void);
} sites[] = {
#define SITE(name, code) {"site_" #name, site_##name},
#include "keep_sites.h"
#undef SITE
};

enum { SITES = sizeof sites / sizeof sites[0] };

// Where run_site keeps what it cannot hold in registers: the state to load and store, the site, the caller's stack.
__thread struct {
    struct state *state;
    void (*site)(void);
    uint64_t stack, rax;
} keep_slot __attribute__((tls_model("local-exec")));

// Loads everything from keep_slot.state, calls the site, stores everything back. Between the two only the site runs.
void run_site(void);
__asm__(".text\n.globl run_site\n.type run_site,@function\nrun_site:\n"
        "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
        "mov %rsp,%fs:keep_slot@tpoff+16\n"
        "mov %fs:keep_slot@tpoff,%rax\n"
        "ldmxcsr 512(%rax)\n"
        ".set i,0\n.rept 16\n"
        // The words below the return address that the call pushes.
        "mov 128+8*i(%rax),%rcx; mov %rcx,-16-8*i(%rsp)\n.set i,i+1\n.endr\n"
        "movups 256(%rax),%xmm0; movups 272(%rax),%xmm1; movups 288(%rax),%xmm2; movups 304(%rax),%xmm3\n"
        "movups 320(%rax),%xmm4; movups 336(%rax),%xmm5; movups 352(%rax),%xmm6; movups 368(%rax),%xmm7\n"
        "movups 384(%rax),%xmm8; movups 400(%rax),%xmm9; movups 416(%rax),%xmm10; movups 432(%rax),%xmm11\n"
        "movups 448(%rax),%xmm12; movups 464(%rax),%xmm13; movups 480(%rax),%xmm14; movups 496(%rax),%xmm15\n"
        "mov 8(%rax),%rbx; mov 16(%rax),%rcx; mov 24(%rax),%rdx; mov 32(%rax),%rsi; mov 40(%rax),%rdi\n"
        "mov 48(%rax),%rbp; mov 56(%rax),%r8; mov 64(%rax),%r9; mov 72(%rax),%r10; mov 80(%rax),%r11\n"
        "mov 88(%rax),%r12; mov 96(%rax),%r13; mov 104(%rax),%r14; mov 112(%rax),%r15\n"
        // The flags go in above the return address, where they are not in the red zone's way: its first word is at
        // -16 from here, and so is out of reach of this push.
        "push 120(%rax); popfq\n"
        "mov (%rax),%rax\n"
        "call *%fs:keep_slot@tpoff+8\n"
        "mov %rax,%fs:keep_slot@tpoff+24\n"
        "mov %fs:keep_slot@tpoff,%rax\n"
        "mov %rbx,8(%rax); mov %rcx,16(%rax)\n"
        ".set i,0\n.rept 16\n"
        "mov -16-8*i(%rsp),%rcx; mov %rcx,128+8*i(%rax)\n.set i,i+1\n.endr\n"
        "pushfq; pop 120(%rax); cld\n"
        "mov %rdx,24(%rax); mov %rsi,32(%rax); mov %rdi,40(%rax)\n"
        "mov %rbp,48(%rax); mov %r8,56(%rax); mov %r9,64(%rax); mov %r10,72(%rax); mov %r11,80(%rax)\n"
        "mov %r12,88(%rax); mov %r13,96(%rax); mov %r14,104(%rax); mov %r15,112(%rax)\n"
        "mov %fs:keep_slot@tpoff+24,%rcx; mov %rcx,(%rax)\n"
        "movups %xmm0,256(%rax); movups %xmm1,272(%rax); movups %xmm2,288(%rax); movups %xmm3,304(%rax)\n"
        "movups %xmm4,320(%rax); movups %xmm5,336(%rax); movups %xmm6,352(%rax); movups %xmm7,368(%rax)\n"
        "movups %xmm8,384(%rax); movups %xmm9,400(%rax); movups %xmm10,416(%rax); movups %xmm11,432(%rax)\n"
        "movups %xmm12,448(%rax); movups %xmm13,464(%rax); movups %xmm14,480(%rax); movups %xmm15,496(%rax)\n"
        "stmxcsr 512(%rax)\n"
        "cmp %fs:keep_slot@tpoff+16,%rsp; je 1f; ud2; 1:\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx; ret\n"
        ".size run_site,.-run_site");

// What each site leaves behind for each pattern, found out before "ready".
static struct state reference[SITES][PATTERNS];
static atomic_long calls[SITES], failures;
static atomic_int stop;
static int signals;

// Where rsi and rdi point. All bytes are 0 and stay so, whichever thread copies one to another.
static uint8_t text[256];

static void fill(struct state *s, int pattern)
{
    uint64_t seed = 0x9e3779b97f4a7c15u * (uint64_t)(pattern + 1);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < GPRS; i++)
        s->gpr[i] = seed ^ (seed << (i + 7)) ^ (uint64_t)i * 0x0101010101010101u;
    for (int i = 0; i < RED_WORDS; i++)
        s->red[i] = ~seed + (uint64_t)i * 0x1111111111111111u;
    for (int i = 0; i < 256; i++)
        s->xmm[i / 16][i % 16] = (uint8_t)(i * 7 + pattern);
    // What string instructions go by.
    s->gpr[4] = (uint64_t)(text + 64);
    s->gpr[5] = (uint64_t)(text + 128);
    // CF PF AF ZF SF OF by the pattern's bits, DF by the seventh; bit 1 is always set and IF cannot be cleared here.
    static const uint64_t flag[] = {1, 4, 0x10, 0x40, 0x80, 0x800, 0x400};
    s->flags = 0x202;
    for (int i = 0; i < 7; i++)
        s->flags |= pattern >> i & 1 ? flag[i] : 0;
    s->mxcsr = 0x1f80;
    s->error = 77;
}

static void run(struct state *s, int site, int pattern)
{
    fill(s, pattern);
    // A signal handler may come here in the middle of a run: what it found is what it leaves.
    __typeof__(keep_slot) saved = keep_slot;
    keep_slot.state = s;
    keep_slot.site = sites[site].code;
    errno = 77;
    run_site();
    s->error = (uint32_t)errno;
    keep_slot = saved;
}

static void check(int site, int pattern)
{
    struct state s;
    run(&s, site, pattern);
    // The last word of the site's red zone is below the caller's, so that a signal on the way may take it.
    if (signals)
        s.red[RED_WORDS - 1] = reference[site][pattern].red[RED_WORDS - 1];
    atomic_fetch_add_explicit(&calls[site], 1, memory_order_relaxed);
    if (!memcmp(&s, &reference[site][pattern], sizeof s))
        return;
    if (atomic_fetch_add(&failures, 1) >= 10)
        return;
    const uint64_t *is = (const uint64_t *)&s, *was = (const uint64_t *)&reference[site][pattern];
    for (size_t i = 0; i < sizeof s / 8; i++)
        if (is[i] != was[i])
            fprintf(stderr, "%s pattern %d word %zu: %016lx, not %016lx\n", sites[site].name, pattern, i,
                    (unsigned long)is[i], (unsigned long)was[i]);
}

static void on_signal(int number)
{
    static atomic_int turn;
    int error = errno, t = atomic_fetch_add(&turn, 1);
    (void)number;
    check(t % SITES, t % PATTERNS);
    errno = error;
}

static void *worker(void *arg)
{
    timer_t timer;
    if (signals) {
        struct sigevent event = {.sigev_notify = SIGEV_THREAD_ID, .sigev_signo = SIGUSR1};
        event._sigev_un._tid = (pid_t)syscall(SYS_gettid);
        struct itimerspec often = {{0, 50000}, {0, 50000}};
        if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &often, NULL))
            exit(1);
    }
    while (!atomic_load_explicit(&stop, memory_order_relaxed))
        for (int site = 0; site < SITES; site++)
            for (int pattern = 0; pattern < PATTERNS; pattern++)
                check(site, pattern);
    if (signals)
        timer_delete(timer);
    return arg;
}

int main(int argc, char **argv)
{
    long threads = argc > 1 ? atol(argv[1]) : 1;
    signals = argc > 2 && !strcmp(argv[2], "signals");
    if (threads < 1 || threads > MAX_THREADS)
        return 2;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, NULL);
    for (int site = 0; site < SITES; site++)
        for (int pattern = 0; pattern < PATTERNS; pattern++)
            run(&reference[site][pattern], site, pattern);
    puts("ready");
    fflush(stdout);
    char byte;
    if (read(0, &byte, 1) < 0)
        return 1;
    pthread_t ids[MAX_THREADS];
    for (long i = 0; i < threads; i++)
        if (pthread_create(&ids[i], NULL, worker, NULL))
            return 1;
    while (read(0, &byte, 1) > 0)
        ;
    atomic_store(&stop, 1);
    for (long i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
    for (int site = 0; site < SITES; site++)
        printf("%s %ld\n", sites[site].name, atomic_load(&calls[site]));
    printf("failures=%ld\n", atomic_load(&failures));
    return atomic_load(&failures) != 0;
}
