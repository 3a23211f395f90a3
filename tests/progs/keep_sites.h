// The sites of keep.c: tiny functions of every shape that a patch has to deal with. Each line is SITE(name, code);
// the probe goes on the first instruction (NAME+OFFSET where an endbr64 leads). All only use what keep.c fills in.
//
// rbx and rbp are ordinary registers here; the words below rsp are the function's red zone.

// One instruction of five bytes and more, flags left alone.
SITE(imm32, "mov $0x11223344,%eax; ret")
SITE(imm64, "movabs $0x1122334455667788,%rax; ret")
SITE(lea32, "lea 0x12345678(%rbx),%rax; ret")
// Relative to rip: the copy must reach the same data.
SITE(riprel_load, "mov keep_data(%rip),%rax; ret")
SITE(riprel_lea, "lea keep_data(%rip),%rax; ret")
SITE(riprel_cmp, "cmpl $5,keep_data(%rip); ret")
// NOPs.
SITE(nop5, ".byte 0x0f,0x1f,0x44,0x00,0x00; add %rcx,%rax; ret")
SITE(nops, ".byte 0x90,0x90,0x90,0x90,0x90; adc %rcx,%rax; ret")
SITE(endbr, ".byte 0xf3,0x0f,0x1e,0xfa; mov %rdi,%rax; lea (%rax,%rsi,2),%rax; ret")
// Several instructions.
SITE(mov_lea, "mov %rdi,%rax; lea (%rax,%rsi,2),%rax; ret")
SITE(push_pop, "push %rbp; mov %rsp,%rbp; mov %rdi,%rax; pop %rbp; ret")
SITE(push_many, "push %r15; push %r14; push %rbx; pop %rbx; pop %r14; pop %r15; ret")
SITE(sub_rsp, "sub $0x18,%rsp; mov %rdi,8(%rsp); mov 8(%rsp),%rax; add $0x18,%rsp; test %rdi,%rdi; ret")
// The red zone is read and written by displaced instructions.
SITE(red_read, "mov -8(%rsp),%rax; mov -120(%rsp),%rdx; ret")
SITE(red_write, "mov %rdi,-16(%rsp); mov %rsi,-120(%rsp); ret")
// Flags come in, go through the site and are used after it.
SITE(flags_adc, "mov %rdi,%rax; mov %rsi,%rdx; adc %rdx,%rax; ret")
SITE(flags_jcc, "mov %rdi,%rax; mov %rsi,%rdx; jo 1f; inc %rax; 1: jp 2f; inc %rdx; 2: ret")
SITE(flags_set, "mov %rdi,%rax; sub %rsi,%rax; setb %dl; ret")
SITE(flags_cmov, "cmovs %rsi,%rax; cmovo %rdi,%rdx; cmovc %r8,%rcx; ret")
// Displaced branches out of the window.
SITE(jcc_out, "test %rdi,%rdi; js 1f; lea 1(%rdi),%rax; ret; 1: lea 2(%rdi),%rax; ret")
SITE(jmp_out, "mov %rdi,%rax; jmp 1f; ud2; 1: lea 3(%rax),%rax; ret")
// Strings go in the direction that DF says.
SITE(string, "mov %rdi,%rax; movsb; mov $1,%edi; mov $2,%esi; ret")
// Vector state.
SITE(sse, "movaps %xmm0,%xmm1; paddq %xmm2,%xmm1; ret")
SITE(mxcsr, "cvtsi2sd %rdi,%xmm3; addsd %xmm4,%xmm3; ret")
