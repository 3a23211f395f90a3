# One word into the record.
mov qword ptr [r10 + {offset:s32}], <value>
