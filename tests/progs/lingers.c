// cc: -O2
// Calls probe_me as fast as it can. Its handler of SIGUSR1 does not return before SIGUSR2 comes, so that what it
// interrupted waits in a signal frame. Prints "lingers" and "goes on" for that; runs until its stdin ends.
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static long wrong;

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

static void say(const char *text)
{
    if (write(1, text, strlen(text)) < 0)
        wrong++;
}

static void linger(int signal)
{
    sigset_t all_but;
    (void)signal;
    say("lingers\n");
    sigfillset(&all_but);
    sigdelset(&all_but, SIGUSR2);
    sigsuspend(&all_but);
    say("goes on\n");
}

static void nothing(int signal)
{
    (void)signal;
}

int main(void)
{
    struct pollfd input = {.fd = 0, .events = POLLIN};
    signal(SIGUSR1, linger);
    signal(SIGUSR2, nothing);
    say("ready\n");
    while (poll(&input, 1, 0) <= 0)
        for (long i = 0; i < 100000; i++)
            wrong += probe_me(2, i) != 2 * 1000003 + i;
    printf("wrong=%ld\n", wrong);
    return 0;
}
