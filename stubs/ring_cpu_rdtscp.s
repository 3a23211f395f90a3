# As ring_cpu_rdpid, for CPUs without rdpid. rdtscp writes rax and rdx, which are saved, and rcx, which r10 keeps.
mov r10, rcx
rdtscp
mov r11d, ecx
mov rcx, r10
and r11d, 4095
