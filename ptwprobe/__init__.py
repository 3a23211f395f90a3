"""ptwprobe: trap-free probes in running x86-64 Linux programs."""
