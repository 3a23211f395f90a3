// cc: -O2 -pthread
// Calls probe_me from two threads, checks the results, and executes itself afresh, so often; the last image prints
// "done". The images live for one to ten times MS.
//
//     reexecs TIMES MS
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static atomic_int stop;
static atomic_long wrong;

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static void *worker(void *arg)
{
    for (long i = 0; !atomic_load(&stop); i++)
        wrong += probe_me(1, i) != 1000003 + i;
    return arg;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    long times = atol(argv[1]), ms = atol(argv[2]) * (times % 10 + 1);
    if (argc == 3)
        puts("ready");
    fflush(stdout);
    pthread_t id;
    if (pthread_create(&id, NULL, worker, NULL))
        return 1;
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    long i = 0;
    do {
        for (int k = 0; k < 1000; k++, i++)
            wrong += probe_me(2, i) != 2000006 + i;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < ms);
    if (wrong)
        return 1;
    if (times) {
        char left[24];
        snprintf(left, sizeof left, "%ld", times - 1);
        // The other thread is still at work, and inside probe_me or its stub as often as not.
        execl("/proc/self/exe", argv[0], left, argv[2], "again", NULL);
        return 1;
    }
    atomic_store(&stop, 1);
    pthread_join(id, NULL);
    puts("done");
    return 0;
}
