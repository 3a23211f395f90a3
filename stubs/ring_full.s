# No room, if the head is still the one that was compared (else the tail may be newer than it): count the hit as lost.
cmp rax, qword ptr [r11]
jne {again:rel32}
lock inc qword ptr [r11 + 64]
jmp {leave:rel32}
