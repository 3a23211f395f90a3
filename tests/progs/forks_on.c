// cc: -O2
// Parent and children call probe_me all the time and check what it returns. Each line of input makes one more child, which
// "child NTH PID" tells. At the end of the input all end, and the parent says whether all was right.
//
//     forks_on
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static long wrong, calls;

static void work(long who)
{
    for (long i = 0; i < 50; i++, calls++)
        wrong += probe_me(who, i) != who * 1000003 + i;
    usleep(1000);
}

int main(void)
{
    int stop[2];
    if (pipe(stop))
        return 1;
    puts("ready");
    fflush(stdout);
    long children = 0, bad = 0;
    for (;;) {
        struct pollfd input = {.fd = 0, .events = POLLIN};
        char line[64];
        work(0);
        if (poll(&input, 1, 0) <= 0)
            continue;
        ssize_t got = read(0, line, sizeof line);
        if (got <= 0)
            break;
        pid_t child = fork();
        if (child == 0) {
            close(stop[1]);
            struct pollfd end = {.fd = stop[0], .events = POLLIN};
            while (poll(&end, 1, 0) <= 0)
                work(1);
            _exit(wrong ? 1 : 0);
        }
        children++;
        printf("child %ld %d\n", children, child);
        fflush(stdout);
    }
    close(stop[1]);
    for (long i = 0; i < children; i++) {
        int status = 0;
        wait(&status);
        bad += status != 0;
    }
    printf("wrong=%ld bad=%ld\n", wrong, bad);
    return 0;
}
