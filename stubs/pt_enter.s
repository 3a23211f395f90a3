# pt form, only where a word has to be computed: step over the red zone and save two scratch registers. No flags.
lea rsp, [rsp - 144]
mov qword ptr [rsp + 0], rax
mov qword ptr [rsp + 8], rcx
