// cc: -O2
// Measures what one call costs, per kind of first instruction: each function has a twin that nobody probes, and the two
// are timed in turn, so that noise hits both alike.
//
//     hitcost CALLS ROUNDS
//
// Output: "ready"; then, after a byte on stdin, one JSON line {"mov":{"bare":[ns per call...],"probed":[...]},...}.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

// In assembly, so that the first instruction is what the name says. The windows that a five-byte jump needs hold plain
// register instructions only.
#define PAIR(name, body)                                                                                               \
    __asm__(".text\n"                                                                                                  \
            ".p2align 6\n.globl " name "_site\n.type " name "_site,@function\n" name "_site:\n" body                   \
            "\n.size " name "_site,.-" name "_site\n"                                                                  \
            ".p2align 6\n.globl " name "_bare\n.type " name "_bare,@function\n" name "_bare:\n" body                   \
            "\n.size " name "_bare,.-" name "_bare\n")

PAIR("mov", "mov %rdi,%rax; lea 1(%rax,%rsi,2),%rax; ret");
PAIR("push", "push %rbp; mov %rsp,%rbp; lea 1(%rdi,%rsi,2),%rax; pop %rbp; ret");
PAIR("nop5", ".byte 0x0f,0x1f,0x44,0x00,0x00; lea 1(%rdi,%rsi,2),%rax; ret");

typedef long function(long, long);
extern function mov_site, mov_bare, push_site, push_bare, nop5_site, nop5_bare;

static const struct {
    const char *name;
    function *bare, *probed;
} cases[] = {{"mov", mov_bare, mov_site}, {"push", push_bare, push_site}, {"nop5", nop5_bare, nop5_site}};

static long expected, got;

static double time_calls(function *f, long calls)
{
    struct timespec a, b;
    long sum = 0;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (long i = 0; i < calls; i++) {
        // The compiler may not turn the pointer into anything but one indirect call.
        __asm__ volatile("" : "+r"(f));
        sum += f(i, 7);
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    got += sum;
    expected += calls * (calls - 1) / 2 + calls * 15;
    return ((double)(b.tv_sec - a.tv_sec) * 1e9 + (double)(b.tv_nsec - a.tv_nsec)) / (double)calls;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    long calls = atol(argv[1]), rounds = atol(argv[2]);
    enum { CASES = sizeof cases / sizeof cases[0], MAX_ROUNDS = 100 };
    static double ns[CASES][2][MAX_ROUNDS];
    if (calls < 1 || rounds < 1 || rounds > MAX_ROUNDS)
        return 2;
    puts("ready");
    fflush(stdout);
    char byte;
    if (read(0, &byte, 1) < 0)
        return 1;
    for (int c = 0; c < CASES; c++) {
        time_calls(cases[c].bare, calls);
        time_calls(cases[c].probed, calls / 10 + 1);
    }
    for (long r = 0; r < rounds; r++)
        for (int c = 0; c < CASES; c++) {
            ns[c][0][r] = time_calls(cases[c].bare, calls);
            ns[c][1][r] = time_calls(cases[c].probed, calls);
        }
    for (int c = 0; c < CASES; c++) {
        printf("%s\"%s\":{", c ? "," : "{", cases[c].name);
        for (int k = 0; k < 2; k++) {
            printf("%s\"%s\":[", k ? "," : "", k ? "probed" : "bare");
            for (long r = 0; r < rounds; r++)
                printf("%s%.3f", r ? "," : "", ns[c][k][r]);
            printf("]");
        }
        printf("}");
    }
    puts("}");
    // A probe that changes a result has no business in a table of costs.
    return got == expected ? 0 : 1;
}
