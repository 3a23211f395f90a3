// cc: -O2 -pthread
// Threads that come and go all the time: four makers, each of which starts short-lived threads one after another.
// Each of these calls probe_me once.
//
//     comers THREADS
//
// Prints "ready", works, prints "worked SUM", works and prints once more; waits for a byte of stdin before each.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define MAKERS 4

static long threads;
static atomic_long sum, failures;

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static void *comer(void *arg)
{
    atomic_fetch_add(&sum, probe_me(1, (long)arg));
    return NULL;
}

static void *maker(void *arg)
{
    for (long i = (long)arg; i < threads; i += MAKERS) {
        pthread_t id;
        if (pthread_create(&id, NULL, comer, (void *)i) || pthread_join(id, NULL))
            failures++;
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    threads = atol(argv[1]);
    char byte;
    puts("ready");
    for (int turn = 0; turn < 2; turn++) {
        pthread_t ids[MAKERS];
        fflush(stdout);
        if (read(0, &byte, 1) < 0)
            return 1;
        for (long i = 0; i < MAKERS; i++)
            if (pthread_create(&ids[i], NULL, maker, (void *)i))
                return 1;
        for (int i = 0; i < MAKERS; i++)
            pthread_join(ids[i], NULL);
        printf("worked %ld\n", (long)sum);
    }
    return failures ? 1 : 5;
}
