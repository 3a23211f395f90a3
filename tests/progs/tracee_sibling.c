// cc: -O1 -D_GNU_SOURCE
// tracee_sibling GENERATIONS: children that share the memory but are no threads (clone with CLONE_VM), each made by the
// one before. The last spends nearly all its time in the second instruction of slow(). Prints "ready" and the pid of the
// last one; after a byte or the end of stdin prints how the first child ended, and whether the last did any work.
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static char buffer[1 << 20];
static volatile int stop, last;
static volatile long rounds;

void slow(void *to, long bytes);
asm(".globl slow\n.type slow,@function\n.p2align 6\nslow: mov %rsi,%rcx\n rep stosb\n mov $1,%eax\n nop\n nop\n nop\n"
    " ret\n.size slow,.-slow");

static int child(void *argument);

static int make_child(long generations) {
    char *stack = malloc(1 << 16);
    return clone(child, stack + (1 << 16), CLONE_VM | SIGCHLD, (void *)generations);
}

static int child(void *argument) {
    long generations = (long)argument;
    int status = 0;
    // Not a thread of the parent, so nothing but this ends it with a test that fails.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (generations > 1) {
        waitpid(make_child(generations - 1), &status, 0);
        return status != 0;
    }
    last = getpid();
    for (; !stop; rounds++)
        slow(buffer, sizeof buffer);
    return 0;
}

int main(int argc, char **argv) {
    int status = -1, pid = make_child(argc > 1 ? atol(argv[1]) : 1);
    while (!last)
        usleep(1000);
    printf("ready %d\n", last);
    fflush(stdout);
    getchar();
    stop = 1;
    waitpid(pid, &status, 0);
    printf("status %d worked %d\n", status, rounds > 0);
    return 0;
}
