# A part of a register, zero- or sign-extended into rax.
<move> <to>, <part>
