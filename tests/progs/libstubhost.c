// cc: -O2 -g -shared -fPIC -pthread
// Runs stub code: with every register, flag and red-zone byte set and read back, and from threads and signal handlers
// with a ring that is drained meanwhile. The Python side is tests/stubexec.py.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

// ---- one run with a known machine state; offsets are used by the assembly

struct state {
  uint64_t gpr[16];     // 0: in the order of the register numbers; rsp is reported, not taken
  uint64_t flags;       // 128
  uint64_t unused;      // 136
  uint8_t xmm[16][16];  // 144
  uint8_t red[128];     // 400
};

void stub_run(void *site, const struct state *in, struct state *out);
extern char stub_landing[];

__asm__(
    ".intel_syntax noprefix\n"
    ".local host_rsp, host_out, host_site, host_rax, entry_rsp\n"
    ".comm host_rsp,8,8\n.comm host_out,8,8\n.comm host_site,8,8\n.comm host_rax,8,8\n.comm entry_rsp,8,8\n"
    ".text\n.globl stub_run\n.type stub_run,@function\n"
    "stub_run:\n"
    "push rbx\npush rbp\npush r12\npush r13\npush r14\npush r15\n"
    "mov [rip+host_rsp], rsp\nmov [rip+host_out], rdx\nmov [rip+host_site], rdi\n"
    "mov rax, rsi\n"
    "sub rsp, 4096\nand rsp, -64\n"
    "lea rdi, [rsp-64-128]\nlea rsi, [rax+400]\nmov ecx, 128\nrep movsb\n"
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\nmovdqu xmm\\n, [rax+144+16*\\n]\n.endr\n"
    "push [rax+128]\npopfq\nlea rsp, [rsp-64]\n"
    "mov [rip+entry_rsp], rsp\n"
    "mov rcx, [rax+8]\nmov rdx, [rax+16]\nmov rbx, [rax+24]\nmov rbp, [rax+40]\n"
    "mov rsi, [rax+48]\nmov rdi, [rax+56]\nmov r8, [rax+64]\nmov r9, [rax+72]\n"
    "mov r10, [rax+80]\nmov r11, [rax+88]\nmov r12, [rax+96]\nmov r13, [rax+104]\n"
    "mov r14, [rax+112]\nmov r15, [rax+120]\nmov rax, [rax]\n"
    "jmp [rip+host_site]\n"
    ".globl stub_landing\n"
    "stub_landing:\n"
    "mov [rip+host_rax], rax\nmov rax, [rip+host_out]\n"
    "mov [rax+8], rcx\nmov [rax+16], rdx\nmov [rax+24], rbx\nmov [rax+32], rsp\nmov [rax+40], rbp\n"
    "mov [rax+48], rsi\nmov [rax+56], rdi\nmov [rax+64], r8\nmov [rax+72], r9\n"
    "mov [rax+80], r10\nmov [rax+88], r11\nmov [rax+96], r12\nmov [rax+104], r13\n"
    "mov [rax+112], r14\nmov [rax+120], r15\n"
    "mov rcx, [rip+host_rax]\nmov [rax], rcx\n"
    "lea rsp, [rsp-256]\npushfq\npop [rax+128]\nlea rsp, [rsp+256]\n"
    ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\nmovdqu [rax+144+16*\\n], xmm\\n\n.endr\n"
    "cld\nlea rsi, [rsp-128]\nlea rdi, [rax+400]\nmov ecx, 128\nrep movsb\n"
    "mov rsp, [rip+host_rsp]\n"
    "pop r15\npop r14\npop r13\npop r12\npop rbp\npop rbx\nret\n"
    ".size stub_run,.-stub_run\n"
    ".globl stub_entry_rsp\n.type stub_entry_rsp,@function\n"
    "stub_entry_rsp:\nmov rax, [rip+entry_rsp]\nret\n"
    ".size stub_entry_rsp,.-stub_entry_rsp\n"
    ".att_syntax\n");

int errno_get(void) { return errno; }
void errno_set(int value) { errno = value; }

uint64_t tsc_now(void) { return __builtin_ia32_rdtsc(); }

// Where in every thread's TLS block its tid stands, as an offset from the fs base; -1 if nowhere near.
long tid_offset(void) {
  const char *base = __builtin_thread_pointer();
  int tid = gettid();
  for (long offset = 0x100; offset < 0x1000; offset += 4)
    if (memcmp(base + offset, &tid, 4) == 0) return offset;
  return -1;
}

// ---- the ring, as a recorder would map it

enum { CONTROL = 0x1000, BLOCK = 0x100, HEAD = 0, LOST = 0x40, TAIL = 0x80, LOST_NO_RING = 0x40, LOAD_GATE = 0x80 };

struct ring {
  uint8_t *control;
  uint8_t *data;
  uint8_t *gate;
  uint32_t rings;
  uint32_t bits;
};

int ring_new(struct ring *ring, uint32_t rings, uint32_t bits, uint64_t start_mark) {
  size_t control_len = (CONTROL + rings * BLOCK + 0xfff) & ~0xfffUL;
  size_t size = 1UL << bits;
  int fd = memfd_create("ring", 0);
  if (fd < 0 || ftruncate(fd, control_len + rings * size)) return -1;
  ring->rings = rings;
  ring->bits = bits;
  ring->control = mmap(NULL, control_len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  ring->data = mmap(NULL, rings * size * 2, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ring->gate = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (ring->control == MAP_FAILED || ring->data == MAP_FAILED || ring->gate == MAP_FAILED) return -1;
  if (madvise(ring->gate, 4096, MADV_WIPEONFORK)) return -1;
  for (uint32_t i = 0; i < rings; i++) {
    for (int half = 0; half < 2; half++)
      if (mmap(ring->data + (2 * i + half) * size, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
               fd, control_len + i * size) == MAP_FAILED)
        return -1;
    *(uint64_t *)(ring->control + CONTROL + i * BLOCK + HEAD) = start_mark;
    *(uint64_t *)(ring->control + CONTROL + i * BLOCK + TAIL) = start_mark;
  }
  *(uint32_t *)ring->gate = 1;
  close(fd);
  return 0;
}

uint64_t ring_lost(const struct ring *ring) {
  uint64_t lost = *(uint64_t *)(ring->control + LOST_NO_RING);
  for (uint32_t i = 0; i < ring->rings; i++) lost += *(uint64_t *)(ring->control + CONTROL + i * BLOCK + LOST);
  return lost;
}

enum { FACTOR = 0x9e3779b9 };

// Reads what is complete. `wrong` counts records whose second word is not FACTOR times the first.
static uint64_t drain(const struct ring *ring, uint64_t *wrong) {
  uint64_t read = 0;
  for (uint32_t i = 0; i < ring->rings; i++) {
    uint8_t *block = ring->control + CONTROL + i * BLOCK;
    _Atomic uint64_t *tail = (_Atomic uint64_t *)(block + TAIL);
    uint64_t start = *tail, mark = start;
    for (uint64_t batch = 0; batch < 4096; batch++) {
      uint8_t *record = ring->data + ((uint64_t)i << (ring->bits + 1)) + (mark & ((1UL << ring->bits) - 1));
      if (atomic_load_explicit((_Atomic uint64_t *)record, memory_order_acquire) != mark) break;
      uint64_t *words = (uint64_t *)record;
      uint32_t count = words[3] >> 16 & 0xff;
      *wrong += count != 2 || words[5] != words[4] * FACTOR || words[3] >> 32 != 0 || words[1] == 0;
      mark += (1UL << 40) + 32 + 8 * count;
      read++;
    }
    if (mark != start) atomic_store_explicit(tail, mark, memory_order_release);
  }
  return read;
}

struct reader {
  const struct ring *ring;
  uint64_t read, wrong;
  int pause_us, cpu;
  _Atomic int stop;
  pthread_t thread;
};

static void *reader_main(void *arg) {
  struct reader *reader = arg;
  if (reader->cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(reader->cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
  for (;;) {
    int stop = reader->stop;
    uint64_t read = drain(reader->ring, &reader->wrong);
    reader->read += read;
    if (stop && read == 0) return NULL;
    if (reader->pause_us && !stop) usleep(reader->pause_us);
  }
}

struct reader *reader_start(const struct ring *ring, int pause_us, int cpu) {
  struct reader *reader = calloc(1, sizeof *reader);
  *reader = (struct reader){.ring = ring, .pause_us = pause_us, .cpu = cpu};
  pthread_create(&reader->thread, NULL, reader_main, reader);
  return reader;
}

void reader_stop(struct reader *reader, uint64_t *read, uint64_t *wrong) {
  reader->stop = 1;
  pthread_join(reader->thread, NULL);
  *read = reader->read;
  *wrong = reader->wrong;
  free(reader);
}

// ---- callers; a probed function adds its two arguments

typedef uint64_t (*function)(uint64_t, uint64_t);

struct caller {
  function call;
  uint64_t count, start, wrong;
  pthread_t thread;
};

static void *caller_main(void *arg) {
  struct caller *caller = arg;
  for (uint64_t i = caller->start; i < caller->start + caller->count; i++)
    caller->wrong += caller->call(i, i * FACTOR) != i + i * FACTOR;
  return NULL;
}

// Calls `call` from `threads` threads, `count` times each; returns how many results were wrong.
uint64_t hammer(function call, int threads, uint64_t count) {
  struct caller callers[16];
  uint64_t wrong = 0;
  for (int i = 0; i < threads; i++) {
    callers[i] = (struct caller){.call = call, .count = count, .start = (uint64_t)i << 40};
    pthread_create(&callers[i].thread, NULL, caller_main, &callers[i]);
  }
  for (int i = 0; i < threads; i++) {
    pthread_join(callers[i].thread, NULL);
    wrong += callers[i].wrong;
  }
  return wrong;
}

static function signalled_call;
static uint64_t signalled, signalled_wrong;

static void on_signal(int number) {
  (void)number;
  int kept = errno;
  uint64_t i = ++signalled;
  signalled_wrong += signalled_call(i, i * FACTOR) != i + i * FACTOR;
  errno = kept;
}

// Calls `call` `count` times while a timer signal every `period_us` calls it too; returns wrong results, and in
// `signals` how many calls the handler made.
uint64_t hammer_signals(function call, uint64_t count, int period_us, uint64_t *signals) {
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
  struct itimerval timer = {{0, period_us}, {0, period_us}}, off = {{0, 0}, {0, 0}};
  struct caller caller = {.call = call, .count = count};
  signalled_call = call;
  sigaction(SIGALRM, &action, NULL);
  setitimer(ITIMER_REAL, &timer, NULL);
  caller_main(&caller);
  setitimer(ITIMER_REAL, &off, NULL);
  *signals = signalled;
  return caller.wrong + signalled_wrong;
}

static uint64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000UL + time.tv_nsec;
}

// Nanoseconds that `count` calls take.
uint64_t timed(function call, uint64_t count) {
  uint64_t start = now_ns();
  for (uint64_t i = 0; i < count; i++) call(i, i * FACTOR);
  return now_ns() - start;
}

// ---- loads that fault, as the tracer treats them: the thread goes on at the fix-up address

struct load {
  uint64_t start, end, fixup;
};

static const struct load *fault_loads;
static int fault_count;

static void on_fault(int number, siginfo_t *info, void *context) {
  (void)number;
  (void)info;
  ucontext_t *user = context;
  uint64_t rip = user->uc_mcontext.gregs[REG_RIP];
  for (int i = 0; i < fault_count; i++)
    if (fault_loads[i].start <= rip && rip < fault_loads[i].end) {
      user->uc_mcontext.gregs[REG_RIP] = fault_loads[i].fixup;
      return;
    }
  _exit(99);
}

void catch_faults(const struct load *loads, int count) {
  struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
  fault_loads = loads;
  fault_count = count;
  sigaction(SIGSEGV, &action, NULL);
  sigaction(SIGBUS, &action, NULL);
}
