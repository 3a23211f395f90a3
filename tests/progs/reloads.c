// cc: -O1
// reloads LIBRARY: loads it (libctors), calls its ctor_called for a few ms, unloads it, and again, until stdin has a byte or
// ends. Prints "ready" when it is loaded for the first time, and at the end how many results were wrong.
#include <dlfcn.h>
#include <poll.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct pollfd input = {.fd = 0, .events = POLLIN};
    long wrong = 0, first = 0, loads = 0;
    for (; poll(&input, 1, 0) == 0; loads++) {
        void *library = dlopen(argc > 1 ? argv[1] : "", RTLD_NOW);
        if (!library)
            return 1;
        long (*called)(long, long) = (long (*)(long, long))dlsym(library, "ctor_called");
        if (!loads) {
            first = called(2, 1);
            puts("ready");
            fflush(stdout);
        }
        for (int i = 0; i < (loads ? 20 : 1500); i++) {
            wrong += called(2, 1) != first;
            usleep(1000);
        }
        dlclose(library);
        usleep(3000);
    }
    printf("wrong=%ld again=%d\n", wrong, loads > 1);
    return 0;
}
