"""What peers that know no perf.data need from one: the trace bytes of each stream and the code that was mapped.

Only files as the generator and ``perf record`` write them: complete, uncompressed, of this byte order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADER = struct.Struct("<8s4Q")
_RECORD = struct.Struct("<IHH")
_AUXTRACE = struct.Struct("<8x3QIIi")
_MMAP2 = struct.Struct("<8x2I3Q24x2I")
_MMAP2_TYPE, _AUXTRACE_TYPE = 10, 71
_PROT_EXEC = 4


@dataclass(frozen=True)
class Image:
    """``size`` bytes of code at ``addr``, which are those from ``file_offset`` on in ``path``."""

    path: Path
    file_offset: int
    size: int
    addr: int


@dataclass(frozen=True)
class AuxData:
    streams: dict[tuple[int, int], bytes]
    """(tid, CPU), of which one is -1, → its trace."""
    images: list[Image]

    @classmethod
    def read(cls, perf_data: Path) -> AuxData:
        content = perf_data.read_bytes()
        streams: dict[tuple[int, int], bytes] = {}
        images = []
        for kind, record, trace in records(content):
            if kind == _AUXTRACE_TYPE:
                *_, tid, cpu = _AUXTRACE.unpack_from(record)
                streams[tid, cpu] = streams.get((tid, cpu), b"") + trace
            elif kind == _MMAP2_TYPE:
                _, _, addr, size, file_offset, prot, _ = _MMAP2.unpack_from(record)
                name = record[_MMAP2.size :].split(b"\0", 1)[0].decode()
                if prot & _PROT_EXEC and Path(name).is_file():
                    images.append(Image(Path(name), file_offset, size, addr))
        return cls(streams, images)


def records(content: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Type, the record, and the trace that follows an AUXTRACE record."""
    magic, *_ = _HEADER.unpack_from(content)
    if magic != b"PERFILE2":
        raise ValueError("not a perf.data")
    at, size = struct.unpack_from("<2Q", content, 40)
    end = at + size
    while at < end:
        kind, _, length = _RECORD.unpack_from(content, at)
        if length < _RECORD.size:
            raise ValueError(f"a record of {length} bytes at {at:#x}")
        record = content[at : at + length]
        at += length
        trace = b""
        if kind == _AUXTRACE_TYPE:
            trace_size = _AUXTRACE.unpack_from(record)[0]
            trace = content[at : at + trace_size]
            at += trace_size
        yield kind, record, trace
