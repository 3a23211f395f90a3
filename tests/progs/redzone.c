// cc: -O1 -D_GNU_SOURCE
// redzone: a leaf function that keeps 16 words below the stack pointer and never moves it, with signals on an alternate stack
// meanwhile. Runs until a byte comes. Prints
// "calls=N wrong=N signals=N on_stack=N off_stack=N": signals handled, and how many of them on that stack or not.
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/time.h>
#include <unistd.h>

// All that leaf is given, 16 times over; the probe's place is leaf+0x52, where all 128 bytes are in use.
long leaf(long value);
__asm__(".text\n.balign 16\n.globl leaf\n.type leaf, @function\nleaf:\n"
        ".set at, -8\n.rept 16\nmov %rdi,at(%rsp)\n.set at, at-8\n.endr\n"
        "xor %eax,%eax\nmov $1,%edx\nmov %rdi,%rcx\n"
        ".set at, -8\n.rept 16\nadd at(%rsp),%rax\n.set at, at-8\n.endr\nret\n.size leaf, .-leaf\n");

static char alternate[64 << 10];
static volatile long signals, on_stack;

static void on_alarm(int signal) {
    char here;
    (void)signal;
    signals++;
    on_stack += &here >= alternate && &here < alternate + sizeof alternate;
}

int main(void) {
    long calls = 0, wrong = 0;
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
    sigaltstack(&stack, 0);
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_ONSTACK | SA_RESTART};
    sigaction(SIGALRM, &action, 0);
    struct itimerval often = {{0, 500}, {0, 500}};
    setitimer(ITIMER_REAL, &often, 0);
    printf("ready\n");
    fflush(stdout);
    for (struct pollfd input = {0, POLLIN, 0}; poll(&input, 1, 1) <= 0;)
        for (int i = 0; i < 200; i++, calls++)
            wrong += leaf(calls) != 16 * calls;
    printf("calls=%ld wrong=%ld signals=%ld on_stack=%ld off_stack=%ld\n", calls, wrong, signals, on_stack,
           signals - on_stack);
    return wrong != 0;
}
