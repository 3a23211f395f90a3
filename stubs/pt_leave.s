# Both scratch registers and the stack pointer as they were. No flags.
mov rax, qword ptr [rsp + 0]
mov rcx, qword ptr [rsp + 8]
lea rsp, [rsp + 144]
