// cc: -O2
// Starts programs all the time, in turn by posix_spawn and by vfork and execve, and calls probe_me in between: once
// before each start, and once in each vfork child.
//
//     spawns STARTS
//
// Prints "ready", works, prints "worked SUM", works and prints once more; waits for a byte of stdin before each.
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

__attribute__((noinline)) static pid_t start_by_vfork(char **words, long i)
{
    pid_t child = vfork();
    if (child == 0) {
        probe_me(2, i);
        execve("/bin/sh", words, environ);
        _exit(127);
    }
    return child;
}

static long work(long starts)
{
    long sum = 0;
    for (long i = 0; i < starts; i++) {
        char status_text[16];
        int status = -1;
        pid_t child = -1;
        snprintf(status_text, sizeof status_text, "exit %ld", i % 100);
        char *words[] = {"sh", "-c", status_text, NULL};
        sum += probe_me(1, i);
        if (i % 2 == 0 && posix_spawn(&child, "/bin/sh", NULL, NULL, words, environ))
            return -1;
        if (i % 2 == 1)
            child = start_by_vfork(words, i);
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status))
            return -1;
        sum += WEXITSTATUS(status);
    }
    return sum;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    char byte;
    puts("ready");
    for (int turn = 0; turn < 2; turn++) {
        fflush(stdout);
        if (read(0, &byte, 1) < 0)
            return 1;
        printf("worked %ld\n", work(atol(argv[1])));
    }
    return 5;
}
