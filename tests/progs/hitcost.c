// cc: -O2
// Measures what one call costs, per kind of first instruction: each function has a twin that nobody probes, and the two
// are timed in turn, so that noise hits both alike.
//
//     hitcost CALLS ROUNDS PAUSE_MS
//
// Each of ROUNDS rounds is a burst of CALLS calls; the pause before it lets whoever drains a buffer catch up, so that no
// burst is measured against a full buffer, where a hit costs less.
//
// Output: "ready"; then, after a byte on stdin, one JSON line {"mov":{"bare":[ns per call...],"probed":[...]},...}.
#include "hitcost.h"

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

extern function mov_site, mov_bare, push_site, push_bare, nop5_site, nop5_bare;

int main(int argc, char **argv)
{
    static const struct pair cases[] = {
        {"mov", mov_bare, mov_site}, {"push", push_bare, push_site}, {"nop5", nop5_bare, nop5_site}};
    return measure(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
