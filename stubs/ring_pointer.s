# Before a load: a pointer that leads into the first 64 KiB, or to no user address, is a fault mark at once, since a real
# fault costs a thousand times as much. 64 KiB less, both are numbers of more than 56 bits.
lea rdx, [<base> + {below:s32}]
shr rdx, 56
jne {fault:rel32}
