// cc: -O1 -D_GNU_SOURCE
// Prints "ready", then sits in vfork for half a second while its child sleeps, then prints "after".
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
    puts("ready");
    fflush(stdout);
    pid_t child = vfork();
    if (child == 0) {
        usleep(500000);
        _exit(0);
    }
    waitpid(child, 0, 0);
    puts("after");
    return 0;
}
