"""ptwprobe: trap-free probes in running x86-64 Linux programs.

with ptwprobe.Session(pid=1234, output="malloc.ptw") as session:
    session.add("libc:malloc size=$arg1")
    session.run(seconds=5)
for hit in ptwprobe.open("malloc.ptw").hits():
    print(hit)
"""

from ptwprobe.errors import PtwprobeError
from ptwprobe.model import Hit, Totals
from ptwprobe.record.session import Session
from ptwprobe.trace.events import Branch, Loss
from ptwprobe.trace.open import open

__all__ = ["Branch", "Hit", "Loss", "PtwprobeError", "Session", "Totals", "open"]
