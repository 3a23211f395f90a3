# Where a word's loads go on after a fault, and where they are skipped: the word is zero. Touches no flags.
mov eax, 0
jmp {word:rel32}
