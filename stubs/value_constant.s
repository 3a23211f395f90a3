# A constant, into rax.
movabs rax, {value:u64}
