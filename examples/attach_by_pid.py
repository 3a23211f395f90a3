"""Attach to several processes by PID with several probes, print hits while they come, let go at Ctrl-C.

    python examples/attach_by_pid.py 'libc:write fd=$arg1:s32 count=$arg3:u64' PID [PID...]

More than one probe: separate them with ';'. The processes run on, unpatched, whatever happens here.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import ptwprobe


def main(probes: list[str], pids: list[int]) -> None:
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "attach.ptw"
        with ptwprobe.Session(pid=pids, output=path, on_note=print) as session:
            for probe in probes:
                session.add(probe)
            session.start()
            trace = ptwprobe.open(path)
            try:
                while session.poll(0.2) is None:
                    for hit in trace.new_hits():
                        print(f"{hit.comm}/{hit.tid} {hit.event} {hit.args}")
            except KeyboardInterrupt:
                pass
            print(session.stop())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main([p.strip() for p in sys.argv[1].split(";")], [int(p) for p in sys.argv[2:]])
