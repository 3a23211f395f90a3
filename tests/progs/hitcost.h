// How programs measure what one call costs: pairs of functions, one to be probed and one not, timed in turn.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

typedef long function(long, long);

// Both functions return a + 2 * b + 1.
struct pair {
    const char *name;
    function *bare, *probed;
};

static long expected, got;

static double time_calls(function *f, long calls, long pause_us)
{
    if (pause_us) {
        usleep((useconds_t)pause_us);
        // A core that wakes up is slow at first.
        for (long i = 0; i < 100000; i++)
            __asm__ volatile("");
    }
    struct timespec a, b;
    long sum = 0;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (long i = 0; i < calls; i++) {
        // The compiler may not turn the pointer into anything but one indirect call.
        __asm__ volatile("" : "+r"(f));
        sum += f(i, 7);
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    got += sum;
    expected += calls * (calls - 1) / 2 + calls * 15;
    return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / (double)calls;
}

static void print_list(const char *name, const double *values, long count)
{
    printf("\"%s\":[", name);
    for (long i = 0; i < count; i++)
        printf("%s%.3f", i ? "," : "", values[i]);
    printf("]");
}

// PROGRAM CALLS ROUNDS PAUSE_MS. Returns the exit code: a probe that changes a result has no business in a table.
static int measure(int argc, char **argv, const struct pair *pairs, int count)
{
    enum { MAX_PAIRS = 8, MAX_ROUNDS = 1000 };
    static double ns[MAX_PAIRS][2][MAX_ROUNDS];
    if (argc != 4 || count > MAX_PAIRS)
        return 2;
    long calls = atol(argv[1]), rounds = atol(argv[2]), pause_us = atol(argv[3]) * 1000;
    if (calls < 1 || rounds < 1 || rounds > MAX_ROUNDS || pause_us < 0)
        return 2;
    puts("ready");
    fflush(stdout);
    char byte;
    if (read(0, &byte, 1) < 0)
        return 1;
    // Caches, page tables and whatever a peer sets up at its first hit.
    for (int p = 0; p < count; p++) {
        time_calls(pairs[p].bare, calls, 0);
        time_calls(pairs[p].probed, calls, 0);
    }
    for (long r = 0; r < rounds; r++)
        for (int p = 0; p < count; p++) {
            ns[p][0][r] = time_calls(pairs[p].bare, calls, pause_us);
            ns[p][1][r] = time_calls(pairs[p].probed, calls, pause_us);
        }
    for (int p = 0; p < count; p++) {
        printf("%s\"%s\":{", p ? "," : "{", pairs[p].name);
        print_list("bare", ns[p][0], rounds);
        printf(",");
        print_list("probed", ns[p][1], rounds);
        printf("}");
    }
    puts("}");
    fflush(stdout);
    // Probes stay until whoever placed them closes stdin.
    while (read(0, &byte, 1) > 0)
        ;
    return got == expected ? 0 : 1;
}
