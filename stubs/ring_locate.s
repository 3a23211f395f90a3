# From the CPU in r11d: r11 = control block of its ring, r10 = start of its data window (twice the ring's size each).
# The prefetch makes the head's line ours before it is read: one transfer between cores instead of two.
cmp r11d, {rings:u32}
jae {no_ring:rel32}
movabs rdx, {data:u64}
mov r10d, r11d
shl r10, {window_bits:u8}
add r10, rdx
movabs rdx, {control:u64}
shl r11d, 8
add r11, rdx
prefetchw [r11]
