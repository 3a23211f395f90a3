// cc: -O1 -D_GNU_SOURCE
// Prints "ready", then sits in vfork for some time while its child sleeps, then prints "after".
//
//     tracee_vfork              half a second, at once
//     tracee_vfork when-told    a second, as soon as the word at the address that is printed is not 0
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile long told;

int main(int argc, char **argv)
{
    (void)argv;
    int waits = argc > 1;
    if (waits)
        printf("ready %p\n", (void *)&told);
    else
        puts("ready");
    fflush(stdout);
    while (waits && !told) {
    }
    pid_t child = vfork();
    if (child == 0) {
        usleep(waits ? 1000000 : 500000);
        _exit(0);
    }
    waitpid(child, 0, 0);
    puts("after");
    return 0;
}
