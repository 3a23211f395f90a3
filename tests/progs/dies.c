// cc: -O2 -pthread
// Ends in the way it is told to, after CALLS calls of probe_me(1, i).
//
//     dies exit|kill|abort|segv|thread-exit CALLS
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static void *hang(void *arg)
{
    for (;;)
        pause();
    return arg;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    const char *how = argv[1];
    long calls = atol(argv[2]), sum = 0;
    puts("ready");
    fflush(stdout);
    char byte;
    if (read(0, &byte, 1) < 0)
        return 1;
    for (long i = 0; i < calls; i++)
        sum += probe_me(1, i);
    printf("sum=%ld\n", sum);
    fflush(stdout);
    if (!strcmp(how, "kill"))
        kill(getpid(), SIGKILL);
    else if (!strcmp(how, "abort"))
        abort();
    else if (!strcmp(how, "segv"))
        __asm__ volatile("movl $1,8");
    else if (!strcmp(how, "thread-exit")) {
        // The other threads are killed by the kernel in the middle of whatever they do.
        pthread_t t;
        for (int i = 0; i < 4; i++)
            pthread_create(&t, NULL, hang, NULL);
    }
    return 7;
}
