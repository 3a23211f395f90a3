# A CPU that has no ring, one that came online later: count the hit as lost.
movabs r11, {lost:u64}
lock inc qword ptr [r11]
jmp {leave:rel32}
