# The mark, last: from here on the reader takes the record as whole.
mov qword ptr [r10], r11
