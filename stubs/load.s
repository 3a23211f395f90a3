# One load: through a pointer, or of a saved register from the stub's own frame.
<move> <to>, <width> ptr [<base> + {offset:s32}]
