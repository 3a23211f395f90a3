// cc: -O2 -pthread
// Threads that call little functions as fast as they can and check every result, and a timer's signal handler that
// does the same in between. Two of the functions take pointers that lead nowhere, which they never follow.
//
//     torture THREADS TIMER_US
//
// Prints "ready", then for every line on stdin, and at its end, "calls=N wrong=N alarms=N". A thread counts as it goes,
// so that a line tells whether the program still works. A SIGSEGV ends it with exit code 3.
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#define MAX_THREADS 256

// Each site has another shape.
//   plain         two instructions in the window
//   wild          gets a pointer that leads nowhere
//   second_byte   jumps back to its second byte, where an instruction begins
//   overlapping   jumps back to its second byte, the inside of its first instruction
//   first_byte    jumps back to its first byte
//   repeats       has a string instruction in the window, so that a thread often stands in the middle of it
//   spins         an instruction in the window jumps to itself
long plain(long a, long b), wild(const void *p, long b), second_byte(long n), overlapping(long n), first_byte(long n);
long repeats(void *to, long n), spins(long n);
__asm__(".text\n"
        ".p2align 6\n.type plain,@function\nplain: mov %rdi,%rax\nimul $31,%rax,%rax\nadd %rsi,%rax\nret\n"
        ".size plain,.-plain\n"
        ".p2align 6\n.type wild,@function\nwild: mov %rdi,%rax\nxor %rsi,%rax\nret\n.size wild,.-wild\n"
        ".p2align 6\n.type second_byte,@function\nsecond_byte: .byte 0x90\n1: lea 3(%rsi),%rsi\ndec %rdi\n"
        "jnz 1b\nmov %rsi,%rax\nret\n.size second_byte,.-second_byte\n"
        // mov $0x9090cfff,%eax; from its second byte on: dec %edi, nop, nop.
        ".p2align 6\n.type overlapping,@function\noverlapping: .byte 0xb8,0xff,0xcf,0x90,0x90\nlea 1(%rsi),%rsi\n"
        "test %edi,%edi\njnz overlapping+1\nadd %rsi,%rax\nret\n.size overlapping,.-overlapping\n"
        ".p2align 6\n.type first_byte,@function\nfirst_byte: lea 5(%rsi),%rsi\ndec %rdi\njnz first_byte\n"
        "mov %rsi,%rax\nret\n.size first_byte,.-first_byte\n"
        ".p2align 6\n.type repeats,@function\nrepeats: mov %esi,%ecx\nrep stosb\nmov %rdi,%rax\nret\n"
        ".size repeats,.-repeats\n"
        ".p2align 6\n.type spins,@function\nspins: mov %edi,%ecx\n1: loop 1b\nlea 7(%rcx),%rax\nret\n"
        ".size spins,.-spins\n");

static atomic_int stop;
static atomic_ulong alarms, calls_on_alarm, wrong;
static struct {
    _Alignas(64) atomic_ulong calls;
} counts[MAX_THREADS];

// Nothing there; no address of user space; the kernel's; the last byte of user space; not aligned.
static const uintptr_t nowhere[] = {0, 8, 0xdead000000000000, 0xffffffff81000000, 0x7ffffffffffff, 0x1003, UINTPTR_MAX};
#define NOWHERE (sizeof nowhere / sizeof *nowhere)

// The functions that loop take their first count in %rsi, which C leaves to us.
static long looped(long (*f)(long), long n)
{
    long (*with_start)(long, long) = (long (*)(long, long))(void (*)(void))f;
    return with_start(n, 100);
}

static unsigned long round_of_calls(long i, char *buffer)
{
    const void *p = (const void *)nowhere[(unsigned long)i % NOWHERE];
    long n = i % 7 + 1, bad = 0;
    bad += plain(i, n) != i * 31 + n;
    bad += wild(p, i) != ((long)p ^ i);
    bad += looped(second_byte, n) != 100 + 3 * n;
    bad += looped(overlapping, n) != 0x9090cfff + 100 + 1 + n;
    bad += looped(first_byte, n) != 100 + 5 * n;
    bad += repeats(buffer, 64 * n) != (long)(buffer + 64 * n);
    bad += spins(n * 8) != 7;
    if (bad)
        atomic_fetch_add(&wrong, (unsigned long)bad);
    return 7;
}

static void on_alarm(int signal)
{
    char buffer[512];
    (void)signal;
    unsigned long turn = atomic_fetch_add(&alarms, 1);
    atomic_fetch_add(&calls_on_alarm, round_of_calls((long)turn, buffer));
}

static void on_fault(int signal)
{
    (void)signal;
    static const char text[] = "SIGSEGV\n";
    if (write(1, text, sizeof text - 1)) {
    }
    _exit(3);
}

static void *hot(void *arg)
{
    long me = (long)arg;
    char buffer[512];
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        unsigned long done = 0;
        for (long i = 0; i < 100; i++)
            done += round_of_calls(i, buffer);
        atomic_fetch_add_explicit(&counts[me].calls, done, memory_order_relaxed);
    }
    return NULL;
}

static void report(int threads)
{
    unsigned long calls = atomic_load(&calls_on_alarm);
    for (int i = 0; i < threads; i++)
        calls += atomic_load(&counts[i].calls);
    printf("calls=%lu wrong=%lu alarms=%lu\n", calls, atomic_load(&wrong), atomic_load(&alarms));
    fflush(stdout);
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    int threads = atoi(argv[1]);
    long timer_us = atol(argv[2]);
    if (threads < 1 || threads > MAX_THREADS)
        return 2;
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART}, fault = {.sa_handler = on_fault};
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGSEGV, &fault, NULL);
    sigaction(SIGBUS, &fault, NULL);
    pthread_t ids[MAX_THREADS];
    for (long i = 0; i < threads; i++)
        if (pthread_create(&ids[i], NULL, hot, (void *)i))
            return 1;
    struct itimerval timer = {{0, timer_us}, {0, timer_us}};
    setitimer(ITIMER_REAL, &timer, NULL);
    puts("ready");
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin))
        report(threads);
    atomic_store(&stop, 1);
    for (int i = 0; i < threads; i++)
        pthread_join(ids[i], NULL);
    report(threads);
    return atomic_load(&wrong) != 0;
}
