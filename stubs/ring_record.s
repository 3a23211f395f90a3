# r10 = the record, r11 = its mark; and the time, read after the reservation.
mov edx, eax
mov r11, rax
and edx, {mask:u32}
add r10, rdx
rdtsc
shl rdx, 32
or rax, rdx
mov qword ptr [r10 + 8], rax
