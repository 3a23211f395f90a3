# A load through a pointer follows: only while the tracer that catches its fault is there.
movabs rdx, {gate:u64}
cmp dword ptr [rdx], {value:u32}
jne {fault:rel32}
