// cc: -O1 -g -fsanitize=address -fno-omit-frame-pointer
// sanitized: allocates, reads and frees under AddressSanitizer, which owns most of the lower address space. Runs until a byte
// comes. Prints "calls=N wrong=N".
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__attribute__((noinline)) long use(long *words, long number) {
    for (long i = 0; i < number; i++)
        words[i] = i;
    return words[number - 1] + number;
}

int main(void) {
    long calls = 0, wrong = 0;
    printf("ready\n");
    fflush(stdout);
    for (struct pollfd input = {0, POLLIN, 0}; !poll(&input, 1, 0);)
        for (int i = 0; i < 100; i++, calls++) {
            long number = 1 + calls % 5000, *words = malloc(number * sizeof *words);
            wrong += use(words, number) != 2 * number - 1;
            free(words);
        }
    printf("calls=%ld wrong=%ld\n", calls, wrong);
    return wrong != 0;
}
