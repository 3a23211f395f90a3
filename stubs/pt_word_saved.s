# One word, from a register that the stub keeps in its frame.
ptwrite qword ptr [rsp + {offset:s32}]
