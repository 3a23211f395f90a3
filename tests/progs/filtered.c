// cc: -O2
// Lives under a seccomp filter that lets it read, write, sleep and end; any other system call kills it. Calls probe_me.
//
//     filtered CALLS
//
// Prints "ready", works, prints "worked SUM", works and prints once more; waits for a byte of stdin before each.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

__attribute__((noinline, noclone)) long probe_me(long a, long b)
{
    long r = a * 1000003 + b;
    __asm__ volatile("" : "+r"(r));
    return r;
}

#define PERMIT(name) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static int confine(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        PERMIT(read),
        PERMIT(write),
        PERMIT(clock_nanosleep),
        PERMIT(restart_syscall),
        PERMIT(exit_group),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

int main(int argc, char **argv)
{
    static char out[4096];
    if (argc != 2)
        return 2;
    long calls = atol(argv[1]), sum = 0;
    setvbuf(stdout, out, _IOFBF, sizeof out);
    if (confine())
        return 1;
    char byte;
    puts("ready");
    for (int turn = 0; turn < 2; turn++) {
        fflush(stdout);
        if (read(0, &byte, 1) < 0)
            return 1;
        for (long i = 0; i < calls; i++) {
            struct timespec moment = {0, 1000};
            sum += probe_me(1, i);
            if (i % 16 == 0)
                clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, NULL);
        }
        printf("worked %ld\n", sum);
    }
    fflush(stdout);
    _exit(5);
}
