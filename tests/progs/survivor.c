// cc: -O2 -pthread -D_GNU_SOURCE
// survivor SPINNING BLOCKED: threads that check all the time what they have of their own: general registers, flags,
// vector registers (AVX where there is it), red zone, signal mask, alternate stack, and results and times of the calls
// that they block in. Prints "ready"; checks until stdin has a byte or ends, raises a signal in every thread, and prints
// "wrong=N rounds=N signals=N". The first mistakes are told on stderr. Exit code 1 if there were any.
#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, SPINS = 20000, WAIT_NS = 3000000 };

static atomic_int stop, wrong, signals;
static atomic_long rounds;
static int has_avx;

struct state {
    uint64_t gpr[14]; // rax rbx rcx rdx rsi rdi r8..r15
    uint64_t flags, spins;
    uint64_t red[16];
    uint8_t vector[16][32];
    uint64_t rbp;
};

// Loads everything from *rdi, counts spins down in memory, stores everything back. The state's address is in rbp.
void spin_sse(struct state *), spin_avx(struct state *);
#define SPIN(name, move, reg)                                                                                          \
    __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ":\n"                                         \
            "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15; mov %rdi,%rbp\n"                        \
            ".set i,0\n.rept 16\nmov 128+8*i(%rbp),%rax; mov %rax,-128+8*i(%rsp)\n.set i,i+1\n.endr\n"                 \
            ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n" #move " 256+32*\\n(%rbp),%" #reg "\\n\n.endr\n"           \
            "mov 8(%rbp),%rbx; mov 16(%rbp),%rcx; mov 24(%rbp),%rdx; mov 32(%rbp),%rsi; mov 40(%rbp),%rdi\n"           \
            "mov 48(%rbp),%r8; mov 56(%rbp),%r9; mov 64(%rbp),%r10; mov 72(%rbp),%r11; mov 80(%rbp),%r12\n"            \
            "mov 88(%rbp),%r13; mov 96(%rbp),%r14; mov 104(%rbp),%r15; mov (%rbp),%rax\n"                              \
            "1: decq 120(%rbp); jnz 1b\n"                                                                              \
            /* CF is not changed by dec; it is set here and looked at after a second spin that changes no flag. */     \
            "stc; std; movq $20000,120(%rbp)\n"                                                                        \
            "2: xchg %rcx,120(%rbp); lea -1(%rcx),%rcx; jrcxz 3f; xchg %rcx,120(%rbp); jmp 2b\n"                       \
            "3: xchg %rcx,120(%rbp)\n"                                                                                 \
            "mov %rax,(%rbp); mov %rbx,8(%rbp); mov %rcx,16(%rbp); mov %rdx,24(%rbp); mov %rsi,32(%rbp)\n"             \
            "mov %rdi,40(%rbp); mov %r8,48(%rbp); mov %r9,56(%rbp); mov %r10,64(%rbp); mov %r11,72(%rbp)\n"            \
            "mov %r12,80(%rbp); mov %r13,88(%rbp); mov %r14,96(%rbp); mov %r15,104(%rbp)\n"                            \
            ".set i,0\n.rept 16\nmov -128+8*i(%rsp),%rax; mov %rax,128+8*i(%rbp)\n.set i,i+1\n.endr\n"                 \
            "pushfq; pop 112(%rbp); cld\n"                                                                             \
            ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n" #move " %" #reg "\\n,256+32*\\n(%rbp)\n.endr\n"           \
            "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx; ret\n.size " #name ",.-" #name "\n");
SPIN(spin_sse, movups, xmm)
SPIN(spin_avx, vmovups, ymm)

static void mistake(const char *what, long number, long is)
{
    if (atomic_fetch_add(&wrong, 1) < 10)
        fprintf(stderr, "%s %ld: %#lx (%s)\n", what, number, is, strerror(errno));
}

static void on_signal(int number)
{
    (void)number;
    atomic_fetch_add(&signals, 1);
}

// What a thread keeps from the kernel: a mask that is its own, and an alternate stack.
static void arrange(long number, sigset_t *mask, stack_t *stack)
{
    sigemptyset(mask);
    sigaddset(mask, SIGRTMIN + 2 + (int)(number % 20));
    pthread_sigmask(SIG_SETMASK, mask, NULL);
    *stack = (stack_t){.ss_sp = malloc(16384), .ss_size = 16384};
    sigaltstack(stack, NULL);
}

static void check_arranged(long number, const sigset_t *mask, const stack_t *stack)
{
    sigset_t now;
    stack_t here;
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    if (memcmp(mask, &now, 8))
        mistake("mask of thread", number, *(long *)&now);
    sigaltstack(NULL, &here);
    if (here.ss_sp != stack->ss_sp || here.ss_flags)
        mistake("alternate stack of thread", number, here.ss_flags);
}

static void *spin(void *argument)
{
    long number = (long)argument;
    sigset_t mask;
    stack_t stack;
    arrange(number, &mask, &stack);
    for (uint64_t round = 1; !atomic_load(&stop); round++) {
        static __thread struct state is, was;
        memset(&was, 0, sizeof was);
        for (int i = 0; i < 14; i++)
            was.gpr[i] = round * 0x9e3779b97f4a7c15u + (uint64_t)i * 0x0101010101010101u;
        for (int i = 0; i < 16; i++)
            was.red[i] = ~round * 0xbf58476d1ce4e5b9u + (uint64_t)i;
        for (int i = 0; i < 512; i++)
            was.vector[i / 32][i % 32] = (uint8_t)(i * 7 + (int)round);
        was.spins = SPINS;
        is = was;
        (has_avx ? spin_avx : spin_sse)(&is);
        for (size_t i = 0; i < sizeof is / 8; i++) {
            uint64_t want = ((uint64_t *)&was)[i], got = ((uint64_t *)&is)[i];
            if (i == 14) // CF and DF
                want = 0x401, got &= 0x401;
            if (i != 15 && want != got)
                mistake("register", (long)i, (long)got);
        }
        check_arranged(number, &mask, &stack);
        atomic_fetch_add(&rounds, 1);
    }
    raise(SIGUSR1);
    return NULL;
}

static long elapsed(const struct timespec *from)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (now.tv_sec - from->tv_sec) * 1000000000 + now.tv_nsec - from->tv_nsec;
}

// As the C library's own calls are made: with the number right before the instruction. Only from there is it known which
// call a thread is in that was stopped before.
static long futex_wait(uint32_t *word, const struct timespec *wait)
{
    register const struct timespec *r10 __asm__("r10") = wait;
    long result;
    __asm__ volatile("mov $202,%%eax; syscall"
                     : "=&a"(result)
                     : "D"(word), "S"(FUTEX_WAIT_PRIVATE), "d"(0), "r"(r10)
                     : "rcx", "r11", "memory");
    return result;
}

static void *block(void *argument)
{
    long number = (long)argument;
    const struct timespec wait = {0, WAIT_NS};
    int pipes[2];
    sigset_t mask;
    stack_t stack;
    arrange(number, &mask, &stack);
    if (pipe(pipes))
        exit(2);
    for (unsigned char round = 1; !atomic_load(&stop); round++) {
        struct timespec begun;
        static __thread uint32_t word;
        clock_gettime(CLOCK_MONOTONIC, &begun);
        long result = 0, want = 0;
        switch (number % 4) {
        case 0:
            result = nanosleep(&wait, NULL);
            break;
        case 1:
            result = futex_wait(&word, &wait);
            want = -ETIMEDOUT;
            break;
        case 2:
            result = poll(&(struct pollfd){pipes[0], POLLIN, 0}, 1, WAIT_NS / 1000000);
            break;
        case 3:
            result = clock_nanosleep(CLOCK_MONOTONIC, 0, &wait, NULL);
        }
        if (result != want)
            mistake("result of call", number % 4, result);
        if (elapsed(&begun) < WAIT_NS)
            mistake("time of call", number % 4, elapsed(&begun));
        unsigned char got = 0;
        if (write(pipes[1], &round, 1) != 1 || read(pipes[0], &got, 1) != 1 || got != round)
            mistake("pipe", number, got);
        check_arranged(number, &mask, &stack);
        atomic_fetch_add(&rounds, 1);
    }
    raise(SIGUSR1);
    return NULL;
}

int main(int argc, char **argv)
{
    int spinning = argc > 1 ? atoi(argv[1]) : 2, blocked = argc > 2 ? atoi(argv[2]) : 4, all = spinning + blocked;
    pthread_t threads[MOST];
    char byte;
    if (all > MOST)
        return 2;
    has_avx = __builtin_cpu_supports("avx");
    signal(SIGUSR1, on_signal);
    for (long i = 0; i < all; i++)
        if (pthread_create(&threads[i], NULL, i < spinning ? spin : block, (void *)i))
            return 2;
    puts("ready");
    fflush(stdout);
    if (read(0, &byte, 1) < 0)
        return 2;
    atomic_store(&stop, 1);
    for (int i = 0; i < all; i++)
        pthread_join(threads[i], NULL);
    printf("wrong=%d rounds=%ld signals=%d\n", atomic_load(&wrong), atomic_load(&rounds), atomic_load(&signals));
    return atomic_load(&wrong) != 0;
}
