# Into rax: a base and an offset that no displacement holds. Touches no flags.
movabs <scratch>, {offset:u64}
lea rax, [<base> + <scratch>]
