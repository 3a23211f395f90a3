"""ptwprobe: trap-free probes in running x86-64 Linux programs.

for hit in ptwprobe.open("malloc.ptw").hits():
    print(hit)
"""

from ptwprobe.errors import PtwprobeError
from ptwprobe.model import Hit, Totals
from ptwprobe.trace.open import open

__all__ = ["Hit", "PtwprobeError", "Totals", "open"]
