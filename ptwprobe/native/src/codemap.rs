//! Which addresses of an ELF file other code jumps to, and where functions begin and end.
