# Reserve a record by one compare-exchange of the head: it succeeds only where the room just seen is still there.
# room = bytes of the ring less those of the record; increment = one record in the count, its bytes in the position.
# rax = the mark of the record.
mov rax, qword ptr [r11]
mov edx, eax
sub edx, dword ptr [r11 + 128]
cmp edx, {room:u32}
ja {full:rel32}
movabs rdx, {increment:u64}
add rdx, rax
lock cmpxchg qword ptr [r11], rdx
jne {again:rel32}
