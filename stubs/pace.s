# Pacing: the word before has left the core when the next one is issued. Without it fast words overflow the PT buffer.
lfence
