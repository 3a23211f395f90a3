// cc: -O2 -Itests/peers -Itests/progs -llttng-ust -ldl
// What an LTTng-UST tracepoint with two arguments costs, measured like hitcost.c: a function with one against its twin.
#define LTTNG_UST_TRACEPOINT_CREATE_PROBES
#define LTTNG_UST_TRACEPOINT_DEFINE
#include "lttng_hit.h"

#include "hitcost.h"

__attribute__((noinline, noclone)) static long traced(long a, long b)
{
    lttng_ust_tracepoint(hitcost, hit, a, b);
    return a + 2 * b + 1;
}

__attribute__((noinline, noclone)) static long bare(long a, long b)
{
    long r = a + 2 * b + 1;
    __asm__ volatile("" : "+r"(r));
    return r;
}

int main(int argc, char **argv)
{
    static const struct pair cases[] = {{"tracepoint", bare, traced}};
    return measure(argc, argv, cases, 1);
}
