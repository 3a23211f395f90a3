# r10 = the record, r11 = its mark; and the time, read after the reservation. The prefetch fetches a line that records to
# come will be written to: the reader's core has it, and waiting for it is what a drained ring costs most.
mov edx, eax
mov r11, rax
and edx, {mask:u32}
add r10, rdx
prefetchw [r10 + 256]
rdtsc
shl rdx, 32
or rax, rdx
mov qword ptr [r10 + 8], rax
