# Back to the instruction after the displaced ones.
jmp {continue_addr:rel32}
