# Ring form: step over the red zone, save what the stub uses, and leave at once while the gate is closed.
# The frame is 40 bytes: rax, rdx, r10, r11, and the status flags as lahf and seto give them (nothing in a stub changes
# another flag). One lea moves the stack pointer, so a signal at any instruction finds red zone and frame whole.
lea rsp, [rsp - 168]
mov qword ptr [rsp + 0], rax
mov qword ptr [rsp + 8], rdx
mov qword ptr [rsp + 16], r10
mov qword ptr [rsp + 24], r11
lahf
seto al
movabs r11, {gate:u64}
mov dword ptr [rsp + 32], eax
cmp dword ptr [r11], 0
je {leave:rel32}
