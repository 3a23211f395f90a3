// cc: -O2
// Calls probe_me in the parent, in a fork child and in a vfork child: CALLS times each, the first argument saying who.
//
//     forks CALLS
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static long run(long who, long calls)
{
    long sum = 0;
    for (long i = 0; i < calls; i++)
        sum += probe_me(who, i);
    return sum;
}

static int status_of(pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    long calls = atol(argv[1]);
    puts("ready");
    fflush(stdout);
    char byte;
    if (read(0, &byte, 1) < 0)
        return 1;
    long parent = run(1, calls);
    pid_t child = fork();
    if (child == 0)
        _exit(run(2, calls) == calls * 2 * 1000003 + calls * (calls - 1) / 2 ? 0 : 1);
    int forked = status_of(child);
    child = vfork();
    if (child == 0) {
        run(3, calls);
        _exit(0);
    }
    int vforked = status_of(child);
    parent += run(4, calls);
    printf("sum=%ld fork=%d vfork=%d\n", parent, forked, vforked);
    return 0;
}
