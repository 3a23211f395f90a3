// cc: -O2
// Calls probe_me(1, i) CALLS times, executes itself afresh, calls probe_me(2, i) CALLS times there, and ends when its
// stdin does.
//
//     execs CALLS
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    char byte;
    long calls = atol(argv[1]), image = argc > 2 ? 2 : 1, sum = 0;
    if (image == 1) {
        puts("ready");
        fflush(stdout);
        if (read(0, &byte, 1) < 0)
            return 1;
    }
    for (long i = 0; i < calls; i++)
        sum += probe_me(image, i);
    printf("image=%ld sum=%ld\n", image, sum);
    fflush(stdout);
    if (image == 1) {
        execl("/proc/self/exe", argv[0], argv[1], "again", NULL);
        return 1;
    }
    while (read(0, &byte, 1) > 0)
        ;
    return 0;
}
