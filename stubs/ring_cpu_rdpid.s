# The number of this CPU, into r11d: the low 12 bits of TSC_AUX (above them stands the NUMA node).
rdpid r11
and r11d, 4095
