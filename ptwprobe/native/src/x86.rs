//! Decoding, relocating and comparing x86-64 instructions.
