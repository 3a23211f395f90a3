# Everything as it was. Adding 127 to the saved bit in al overflows exactly where OF was set; sahf does the other flags.
mov eax, dword ptr [rsp + 32]
mov rdx, qword ptr [rsp + 8]
mov r10, qword ptr [rsp + 16]
mov r11, qword ptr [rsp + 24]
add al, 127
sahf
mov rax, qword ptr [rsp + 0]
lea rsp, [rsp + 168]
