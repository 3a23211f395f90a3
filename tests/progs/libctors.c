// cc: -O2 -shared -fPIC
// A library whose constructor already calls what a user may want to probe.
__attribute__((noinline, noclone)) long ctor_called(long who, long i)
{
    long r = who * 1000 + i;
    __asm__ volatile("" : "+r"(r));
    return r;
}

long ctor_sum;

__attribute__((constructor)) static void run_before_main(void)
{
    for (long i = 0; i < 5; i++)
        ctor_sum += ctor_called(1, i);
}
