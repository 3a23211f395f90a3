# The stack pointer as it is at the site, into rax.
lea rax, [rsp + {frame:s32}]
