// cc: -O2
// needs: libctors
// Calls ctor_called 3 times after the library's constructor has called it 5 times.
#include <stdio.h>

long ctor_called(long who, long i);
extern long ctor_sum;

int main(void)
{
    for (long i = 0; i < 3; i++)
        ctor_sum += ctor_called(2, i);
    printf("sum=%ld\n", ctor_sum);
    return 0;
}
