// cc: -O2 -pthread -D_GNU_SOURCE
// gaps HOT BLOCKED: how long a program is kept from running. HOT threads read the clock all the time and keep the longest
// gap between two readings; BLOCKED threads wait in a call each. Prints "ready"; then answers every line on stdin with
// "gap NS": the longest gap of any thread since the last answer. Ends with stdin. It has 2,000 functions, fn_0 to fn_1999.
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_HOT = 64 };

__asm__(".text\n.altmacro\n.macro function n\n.p2align 6\n.globl fn_\\n\n.type fn_\\n,@function\n"
        "fn_\\n: lea (%rdi,%rsi),%rax\n add $\\n,%rax\n nop\n ret\n.size fn_\\n,.-fn_\\n\n.endm\n"
        ".set i,0\n.rept 2000\nfunction %i\n.set i,i+1\n.endr\n.noaltmacro");

static _Atomic uint64_t longest[MOST_HOT], latest[MOST_HOT];

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *read_clock(void *argument)
{
    _Atomic uint64_t *mine = argument, *last = &latest[mine - longest];
    for (uint64_t before = now();;) {
        uint64_t t = now();
        if (t - before > atomic_load_explicit(mine, memory_order_relaxed))
            atomic_store_explicit(mine, t - before, memory_order_relaxed);
        atomic_store_explicit(last, before = t, memory_order_release);
    }
    return NULL;
}

static void *block(void *argument)
{
    uint32_t word = 0;
    int pipes[2];
    struct timespec long_time = {1000, 0};
    if (pipe(pipes))
        exit(2);
    switch ((long)argument % 4) {
    case 0:
        syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
        break;
    case 1:
        nanosleep(&long_time, NULL);
        break;
    case 2:
        poll(&(struct pollfd){pipes[0], POLLIN, 0}, 1, 1000000);
        break;
    case 3:
        if (read(pipes[0], &word, 1) < 0)
            exit(2);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    long hot = argc > 1 ? atol(argv[1]) : 1, blocked = argc > 2 ? atol(argv[2]) : 0;
    pthread_attr_t attributes;
    pthread_t thread;
    char line[16];
    if (hot > MOST_HOT || pthread_attr_init(&attributes) || pthread_attr_setstacksize(&attributes, 1 << 18))
        return 2;
    for (long i = 0; i < blocked; i++)
        if (pthread_create(&thread, &attributes, block, (void *)i))
            return 2;
    for (long i = 0; i < hot; i++)
        if (pthread_create(&thread, &attributes, read_clock, &longest[i]))
            return 2;
    usleep(100000);
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        uint64_t all = 0, asked = now();
        for (long i = 0; i < hot; i++) {
            // A gap is known when it is over.
            while (atomic_load_explicit(&latest[i], memory_order_acquire) < asked)
                usleep(20);
            uint64_t gap = atomic_exchange(&longest[i], 0);
            all = gap > all ? gap : all;
        }
        printf("gap %lu\n", (unsigned long)all);
        fflush(stdout);
    }
    return 0;
}
