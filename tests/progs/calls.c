// cc: -O2 -pthread
// The counting target: THREADS threads, each calling probe_me(thread index, i) CALLS times, RATE calls a second and
// thread (0: as fast as it goes). Starts at a byte (or the end) of stdin, so that probes can go in before.
//
//     calls THREADS CALLS RATE
//
// Output: "ready", then "calls=N checksum=X": the checksum depends on every call's arguments and result.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 64

static long calls_per_thread, rate;
static uint64_t sums[MAX_THREADS];
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

// Kept out of line and opaque, so that every iteration is a real call with both arguments in their registers.
__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = (a + 1) * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static void sleep_until(struct timespec start, long ms)
{
    struct timespec t = start;
    t.tv_sec += ms / 1000;
    t.tv_nsec += ms % 1000 * 1000000;
    if (t.tv_nsec >= 1000000000) {
        t.tv_nsec -= 1000000000;
        t.tv_sec++;
    }
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static void *worker(void *arg)
{
    long me = (long)arg;
    uint64_t sum = 0;
    pthread_mutex_lock(&gate);
    pthread_mutex_unlock(&gate);
    struct timespec start;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long i = 0, ms = 0; i < calls_per_thread;) {
        // With a rate, a millisecond's share at a time, against an absolute clock so that lateness does not add up.
        long until = calls_per_thread;
        if (rate) {
            sleep_until(start, ms++);
            until = ms * rate / 1000;
            if (until > calls_per_thread)
                until = calls_per_thread;
        }
        for (; i < until; i++)
            sum = sum * 31 + (uint64_t)probe_me(me, i);
    }
    sums[me] = sum;
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    long threads = atol(argv[1]);
    calls_per_thread = atol(argv[2]);
    rate = atol(argv[3]);
    if (threads < 1 || threads > MAX_THREADS)
        return 2;
    pthread_t ids[MAX_THREADS];
    pthread_mutex_lock(&gate);
    for (long i = 0; i < threads; i++)
        if (pthread_create(&ids[i], NULL, worker, (void *)i))
            return 1;
    puts("ready");
    fflush(stdout);
    char byte;
    if (read(0, &byte, 1) < 0)
        return 1;
    pthread_mutex_unlock(&gate);
    uint64_t sum = 0;
    for (long i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        sum = sum * 1000003 + sums[i];
    }
    printf("calls=%ld checksum=%016lx\n", threads * calls_per_thread, (unsigned long)sum);
    return 0;
}
