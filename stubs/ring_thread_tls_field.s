# The thread word: the tid that libc keeps at a fixed place of every thread's TLS block.
mov eax, dword ptr fs:[{offset:u64}]
mov qword ptr [r10 + 16], rax
