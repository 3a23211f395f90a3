"""Record a command from its start and decode the session: time between a thread's consecutive hits, by event.

python examples/record_and_decode.py OUT.ptw 'libc:write count=$arg3:u64' -- COMMAND [ARG...]
"""

import sys
from statistics import median

import ptwprobe


def main(output: str, probe: str, command: list[str]) -> None:
    with ptwprobe.Session(command=command, output=output, on_note=print) as session:
        session.add(probe)
        session.run()
    last: dict[int, int] = {}
    gaps: dict[str, list[int]] = {}
    trace = ptwprobe.open(output)
    for hit in trace.hits():
        if hit.tid in last:
            gaps.setdefault(hit.event, []).append(hit.ns - last[hit.tid])
        last[hit.tid] = hit.ns
    for event, values in gaps.items():
        print(f"{event}: {len(values)} gaps, median {median(values):,.0f} ns")
    print(trace.totals())


if __name__ == "__main__":
    if "--" not in sys.argv or sys.argv.index("--") != 3 or len(sys.argv) < 5:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[4:])
