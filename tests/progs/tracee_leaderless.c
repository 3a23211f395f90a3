// cc: -O1 -pthread
// The first thread ends; another one prints "ready", waits for a byte and prints "done".
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static void *rest(void *arg) {
    (void)arg;
    usleep(50000);
    puts("ready");
    fflush(stdout);
    getchar();
    puts("done");
    exit(0);
}

int main(void) {
    pthread_t thread;
    pthread_create(&thread, 0, rest, 0);
    pthread_exit(0);
}
