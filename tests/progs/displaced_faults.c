// cc: -O1 -D_GNU_SOURCE
// displaced_faults WHAT HOW: functions with an instruction that faults on purpose and that a probe displaces.
// WHAT: first (a load, at first+0), later (a load behind another instruction, at later+0), divide (by zero, at divide+0x5), illegal (ud2,
// at illegal+0x5), elsewhere (a load that a probe at elsewhere+0 does not displace). HOW the handler ends: retry (returns to
// the instruction with good operands), skip (returns behind it), jump (siglongjmp); die: no handler, one fault at the end.
// Half of the calls fault. Runs until a byte comes. Prints
// "calls=N handled=N wrong_rip=N wrong_addr=N wrong_value=N on_stack=N" (on_stack: handled on the alternate stack).
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>

typedef long function(const long *p);
function first, later, divide, illegal, elsewhere;
__asm__(".text\n"
        ".macro begin name\n.balign 16\n.globl \\name\n.type \\name, @function\n\\name:\n.endm\n"
        ".macro end name\nadd $1,%rax\nret\n.size \\name, .-\\name\n.endm\n"
        "begin first\nmov (%rdi),%rax\nend first\n"
        "begin later\nmov %rdi,%rax\nmov (%rax),%rax\nend later\n"
        "begin divide\nmov $41,%eax\nxor %edx,%edx\ndiv %rdi\nend divide\n"
        "begin illegal\nmov $41,%eax\ntest %rdi,%rdi\nud2\nend illegal\n"
        "begin elsewhere\nxor %eax,%eax\nmov %rdi,%rdx\nmov (%rdx),%rax\nend elsewhere\n");

static const struct {
    const char *name;
    function *call;
    int offset, length, is_code;
    long good, bad;
} table[] = {
    {"first", first, 0, 3, 0, 0, 8},     {"later", later, 3, 3, 0, 0, 8},
    {"divide", divide, 7, 3, 1, 1, 0},  {"illegal", illegal, 8, 2, 1, 0, 0},
    {"elsewhere", elsewhere, 5, 3, 0, 0, 8},
}, *row = table;
static char alternate[64 << 10];
static const long value = 41;
static long calls, wrong_value, handled, wrong_rip, wrong_addr, on_stack;
static const char *how;
static sigjmp_buf again;

static long operand(int fails) {
    return fails ? row->bad : row->good ? row->good : (long)&value;
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    char here;
    (void)signal;
    handled++;
    on_stack += &here >= alternate && &here < alternate + sizeof alternate;
    wrong_rip += regs[REG_RIP] != (greg_t)row->call + row->offset;
    wrong_addr += (long)info->si_addr != (row->is_code ? (long)row->call + row->offset : row->bad);
    if (!strcmp(how, "jump"))
        siglongjmp(again, 1);
    if (!strcmp(how, "skip") || row->call == illegal)
        regs[REG_RIP] += row->length, regs[REG_RAX] = 41;
    else
        regs[REG_RDI] = operand(0), regs[row->call == divide ? REG_RDI : REG_RAX] = regs[REG_RDX] = operand(0);
    if (row->call == divide)
        regs[REG_RDX] = 0;
}

int main(int argc, char **argv) {
    while (row->name && argc > 1 && strcmp(row->name, argv[1]))
        row++;
    how = argc > 2 ? argv[2] : "retry";
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    sigaltstack(&stack, 0);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (strcmp(how, "die")) {
        sigaction(SIGSEGV, &action, 0);
        sigaction(SIGFPE, &action, 0);
        sigaction(SIGILL, &action, 0);
    }
    printf("ready\n");
    fflush(stdout);
    struct pollfd input = {0, POLLIN, 0};
    while (!poll(&input, 1, 1))
        for (volatile int i = 0; i < 20; i++) {
            calls++;
            if (!strcmp(how, "die") && row->call == illegal)
                continue;
            if (sigsetjmp(again, 1) == 0)
                wrong_value += row->call((long *)operand(i & 1 && strcmp(how, "die"))) != 42;
        }
    if (!strcmp(how, "die"))
        row->call((long *)operand(1));
    printf("calls=%ld handled=%ld wrong_rip=%ld wrong_addr=%ld wrong_value=%ld on_stack=%ld\n", calls, handled, wrong_rip,
           wrong_addr, wrong_value, on_stack);
    return wrong_value != 0;
}
