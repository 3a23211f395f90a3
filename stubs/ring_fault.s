# Where a word's loads go on after a fault, and where they are skipped: its bit in the fault mask, and zero.
or dword ptr [r10 + 28], {bit:u32}
xor eax, eax
jmp {store:rel32}
