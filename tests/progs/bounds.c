// cc: -O1 -D_GNU_SOURCE -static -no-pie
// bounds WHAT [N]: a program at a fixed address, its heap right behind it, that goes to its limits when a byte comes.
// WHAT: brk (grows by N MiB, step by step), stack (uses the stack up to 64 KiB before RLIMIT_STACK), maps (has N mappings left
// before the byte). Meanwhile it calls its functions f1000 to f2999 all the time. Prints "calls=N wrong=N grown=BYTES".
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

// 2,000 functions of the same shape: fN(x) = x + 0x10000000 + N.
#define F(n) __attribute__((noinline)) long f##n(long x) { __asm__ volatile(""); return x + 0x10000000 + n; }
#define F10(n) F(n##0) F(n##1) F(n##2) F(n##3) F(n##4) F(n##5) F(n##6) F(n##7) F(n##8) F(n##9)
#define F100(n) F10(n##0) F10(n##1) F10(n##2) F10(n##3) F10(n##4) F10(n##5) F10(n##6) F10(n##7) F10(n##8) F10(n##9)
#define F1000(n) F100(n##0) F100(n##1) F100(n##2) F100(n##3) F100(n##4) F100(n##5) F100(n##6) F100(n##7) F100(n##8) F100(n##9)
F1000(1) F1000(2)
#define P(n) f##n,
#define P10(n) P(n##0) P(n##1) P(n##2) P(n##3) P(n##4) P(n##5) P(n##6) P(n##7) P(n##8) P(n##9)
#define P100(n) P10(n##0) P10(n##1) P10(n##2) P10(n##3) P10(n##4) P10(n##5) P10(n##6) P10(n##7) P10(n##8) P10(n##9)
#define P1000(n) P100(n##0) P100(n##1) P100(n##2) P100(n##3) P100(n##4) P100(n##5) P100(n##6) P100(n##7) P100(n##8) P100(n##9)
static long (*const functions[])(long) = {P1000(1) P1000(2)};

static long calls, wrong;

static void call_all(void) {
    for (int i = 0; i < 2000; i++, calls++)
        wrong += functions[i](i) != i + 0x10000000 + 1000 + i;
}

static long grow_brk(long bytes) {
    char *start = sbrk(0), *at = start;
    for (; at - start < bytes; at += 1 << 20) {
        if (sbrk(1 << 20) != at)
            break;
        at[0] = at[(1 << 20) - 1] = 1;
    }
    return at - start;
}

static const char *stack_top;

static __attribute__((noinline)) long use_stack(long bytes) {
    volatile char page[4096];
    page[0] = 1;
    functions[bytes & 1](bytes);
    const char *here = __builtin_frame_address(0);
    if (!stack_top)
        stack_top = here;
    if (stack_top - here < bytes)
        return use_stack(bytes) + page[0] - 1;
    return stack_top - here;
}

static void use_up_mappings(long left) {
    long limit = 65530, used = 0;
    FILE *file = fopen("/proc/sys/vm/max_map_count", "r");
    if (!file || fscanf(file, "%ld", &limit) != 1)
        exit(2);
    fclose(file);
    file = fopen("/proc/self/maps", "r");
    for (int c; file && (c = getc(file)) != EOF;)
        used += c == '\n';
    // Neighbours with different rights do not merge.
    for (long i = used; i < limit - left; i++)
        if (mmap(0, 4096, i & 1 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
            exit(3);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "brk";
    long number = argc > 2 ? atol(argv[2]) : 0, grown = 0;
    struct rlimit limit;
    if (!strcmp(what, "maps"))
        use_up_mappings(number);
    printf("ready\n");
    fflush(stdout);
    for (struct pollfd input = {0, POLLIN, 0}; !poll(&input, 1, 1);)
        call_all();
    if (!strcmp(what, "brk"))
        grown = grow_brk(number << 20);
    getrlimit(RLIMIT_STACK, &limit);
    if (!strcmp(what, "stack"))
        grown = use_stack(limit.rlim_cur == RLIM_INFINITY ? number << 20 : (long)limit.rlim_cur - (64 << 10));
    call_all();
    printf("calls=%ld wrong=%ld grown=%ld\n", calls, wrong, grown);
    return wrong != 0;
}
