# Event id and number of words; the same store clears the fault mask above them.
mov qword ptr [r10 + 24], {header:u32}
