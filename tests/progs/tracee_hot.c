// cc: -O2 -pthread
// tracee_hot THREADS TIMER_US: threads that call three little functions as fast as they can and check the results,
// under a timer signal if TIMER_US is not 0. Prints "ready NOP_SITE WINDOW_SITE CROSSING_SITE" (hex addresses), runs
// until a byte comes, prints "calls=N wrong=N alarms=N interrupted=N".
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

unsigned nop_site(unsigned x);
unsigned window_site(unsigned x);
unsigned crossing_site(unsigned x);
// One starts with a 5-byte NOP; the others' first five bytes are two instructions, which of the last lie in two pages.
__asm__(".text\n.p2align 6\nnop_site: .byte 0x0f,0x1f,0x44,0,0\nlea 7(%rdi),%eax\nret\n"
        ".p2align 6\nwindow_site: .byte 0x8d,0x04,0x7f\n.byte 0xff,0xc0\nret\n"
        ".p2align 12\n.skip 4093\ncrossing_site: .byte 0x8d,0x04,0x7f\n.byte 0xff,0xc0\nret\n");

static atomic_int stop;
static atomic_ulong calls, wrong, alarms;

static void on_alarm(int signal) {
    (void)signal;
    alarms++;
}

static void *hot(void *arg) {
    unsigned long done = 0, bad = 0;
    (void)arg;
    while (!stop)
        for (unsigned i = 0; i < 1000; i++, done += 3) {
            bad += nop_site(i) != i + 7;
            bad += window_site(i) != 3 * i + 1;
            bad += crossing_site(i) != 3 * i + 1;
        }
    calls += done;
    wrong += bad;
    return 0;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1, timer_us = argc > 2 ? atoi(argv[2]) : 0, interrupted = 0;
    pthread_t ids[256];
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    for (int i = 0; i < threads; i++)
        pthread_create(&ids[i], 0, hot, 0);
    sigaction(SIGALRM, &action, 0);
    struct itimerval timer = {{0, timer_us}, {0, timer_us}};
    setitimer(ITIMER_REAL, &timer, 0);
    printf("ready %lx %lx %lx\n", (unsigned long)nop_site, (unsigned long)window_site, (unsigned long)crossing_site);
    fflush(stdout);
    while (getchar() == EOF && ferror(stdin) && errno == EINTR) {
        interrupted++;
        clearerr(stdin);
    }
    stop = 1;
    for (int i = 0; i < threads; i++)
        pthread_join(ids[i], 0);
    printf("calls=%lu wrong=%lu alarms=%lu interrupted=%d\n", calls, wrong, alarms, interrupted);
    return wrong != 0;
}
