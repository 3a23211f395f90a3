# The thread word: the base of the thread's TLS block, which the recorder maps to a tid.
rdfsbase rdx
mov qword ptr [r10 + 16], rdx
