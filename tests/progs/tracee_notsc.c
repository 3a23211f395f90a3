// cc: -O1 -D_GNU_SOURCE
// tracee_notsc tsc|strict: gives up the right to read the time stamp counter, by prctl PR_SET_TSC or with seccomp's strict
// mode. Prints "ready", waits for a byte, calls probe_me 1000 times, writes "done" and ends with 9.
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((noinline)) long probe_me(long a, long b) {
    asm volatile("");
    return a * 3 + b;
}

int main(int argc, char **argv) {
    char byte;
    volatile long sum = 0;
    if (argc > 1 && argv[1][0] == 's')
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    else
        prctl(PR_SET_TSC, PR_TSC_SIGSEGV);
    if (write(1, "ready\n", 6) != 6 || read(0, &byte, 1) < 0)
        return 1;
    for (long i = 0; i < 1000; i++)
        sum += probe_me(1, i);
    if (write(1, "done\n", 5) != 5)
        return 1;
    syscall(SYS_exit, 9);
    return 0;
}
