// cc: -O2 -fPIC -shared -pthread
// Small pieces of work with all kinds of control flow. work(i, seed) does piece i; the result depends on every step.

#include <stdint.h>
#include <string.h>

typedef uint64_t u64;
#define PIECE __attribute__((noinline)) static u64

static u64 mix(u64 x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    return x ^ x >> 29;
}

PIECE loops(u64 seed) {
    u64 sum = 0;
    for (unsigned i = 0; i < 40; i++) {
        for (unsigned j = i; j; j &= j - 1) sum += mix(seed + j);
        if (sum & 8) continue;
        sum = sum << 1 | sum >> 63;
    }
    return sum;
}

PIECE switches(u64 seed) {
    u64 out = seed;
    for (int i = 0; i < 64; i++) {
        switch (out % 11) {
        case 0: out += 3; break;
        case 1: out ^= seed << 3; break;
        case 2: out = mix(out); break;
        case 3: out *= 5; /* fall through */
        case 4: out -= i; break;
        case 5: out = ~out; break;
        case 6: out ^= out >> 7; break;
        case 7: out += out << 9; break;
        case 8: if (i > 40) return out; out++; break;
        default: out = out * 31 + 7; break;
        }
    }
    return out;
}

__attribute__((noinline)) static u64 recurse(u64 n, u64 seed) {
    return n < 2 ? mix(seed + n) : recurse(n - 1, seed) * 3 + recurse(n - 2, seed ^ n);
}
PIECE recursion(u64 seed) { return recurse(12, seed); }

PIECE vectors(u64 seed) {
    float a[64], b[64], sum = 0;
    for (int i = 0; i < 64; i++) {
        a[i] = (float)(seed % 97 + i);
        b[i] = a[i] * 0.5f + 1;
    }
    for (int i = 0; i < 64; i++) sum += a[i] * b[63 - i];
    u64 out = 0;
    memcpy(&out, &sum, sizeof sum);
    return out;
}

static u64 (*const pointers[])(u64) = {loops, switches};
PIECE tail_call(u64 seed) { return pointers[seed & 1](seed + 1); }

// A loop back to the second byte of the function (the first is a prefix), and one back to the first.
u64 back_to_second_byte(u64 n);
u64 back_to_entry(u64 n);
__asm__(
    ".text\n.type back_to_second_byte, @function\nback_to_second_byte:\n.cfi_startproc\n"
    "    .byte 0x48\n"
    "1:  lea 1(%rdi), %eax\n"
    "    add %eax, %edi\n"
    "    cmp $1000000, %edi\n"
    "    jb 1b\n"
    "    mov %rdi, %rax\n"
    "    ret\n.cfi_endproc\n.size back_to_second_byte, .-back_to_second_byte\n"
    ".type back_to_entry, @function\nback_to_entry:\n.cfi_startproc\n"
    "    dec %rdi\n"
    "    jg back_to_entry\n"
    "    mov %rdi, %rax\n"
    "    ret\n.cfi_endproc\n.size back_to_entry, .-back_to_entry\n"
    ".type counted, @function\ncounted:\n.cfi_startproc\n"
    "    lea 3(%rdi), %ecx\n"
    "    and $63, %ecx\n"
    "    xor %eax, %eax\n"
    "    jrcxz 2f\n"
    "1:  add %rdi, %rax\n"
    "    rol $3, %rax\n"
    "    loop 1b\n"
    "2:  jecxz 3f\n"
    "    ud2\n"
    "3:  ret\n.cfi_endproc\n.size counted, .-counted\n");
u64 counted(u64 n);

PIECE second_byte(u64 seed) { return back_to_second_byte(seed & 0xff); }
PIECE entry(u64 seed) { return back_to_entry(seed & 0xff) + seed; }
PIECE loop_instruction(u64 seed) { return counted(seed); }

u64 work(unsigned piece, u64 seed) {
    static u64 (*const pieces[])(u64) = {
        loops, switches, recursion, vectors, tail_call, second_byte, entry, loop_instruction,
    };
    return pieces[piece & 7](seed);
}
