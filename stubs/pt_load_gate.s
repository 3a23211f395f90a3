# A load through a pointer follows: only in a process that emits (not in a fork child, whose faults nobody catches), and
# only while the tracer that catches its fault is there. Touches no flags: the word less the wanted value is zero, and
# jecxz tests that.
movabs rcx, {gate:u64}
mov ecx, dword ptr [rcx]
jecxz {closed:rel8}
movabs rcx, {load_gate:u64}
mov ecx, dword ptr [rcx]
lea ecx, [rcx + {minus_value:s32}]
jecxz {load:rel8}
jmp {fault:rel32}
