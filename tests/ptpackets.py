"""Intel PT packets written by hand, for tests. Independent of the native encoder.

Layouts: Intel SDM volume 3, "Intel Processor Trace", packet definitions. Addresses are written in full (8 bytes) unless
a packet says otherwise.
"""

from __future__ import annotations

PSB = bytes.fromhex("0282") * 8
PSBEND = bytes.fromhex("0223")
OVF = bytes.fromhex("02f3")
TRACE_STOP = bytes.fromhex("0283")


def tnt(outcomes: str) -> bytes:
    """A short TNT of up to 6 branches, the oldest first: ``T`` taken, ``N`` not."""
    assert 1 <= len(outcomes) <= 6
    value = 1
    for outcome in outcomes:
        value = value << 1 | (outcome == "T")
    return bytes([value << 1])


def long_tnt(outcomes: str) -> bytes:
    """A long TNT of up to 47 branches."""
    assert 1 <= len(outcomes) <= 47
    value = 1
    for outcome in outcomes:
        value = value << 1 | (outcome == "T")
    return bytes.fromhex("02a3") + value.to_bytes(6, "little")


def _ip(op: int, ip: int | None) -> bytes:
    return bytes([op]) if ip is None else bytes([op | 6 << 5]) + ip.to_bytes(8, "little")


def tip(ip: int | None = None) -> bytes:
    return _ip(0x0D, ip)


def pge(ip: int | None = None) -> bytes:
    return _ip(0x11, ip)


def pgd(ip: int | None = None) -> bytes:
    return _ip(0x01, ip)


def fup(ip: int | None = None) -> bytes:
    return _ip(0x1D, ip)


def tsc(value: int) -> bytes:
    return b"\x19" + (value & ((1 << 56) - 1)).to_bytes(7, "little")


def ptw(value: int, ip: int | None = None) -> bytes:
    """An 8-byte PTW and, with ``ip``, its FUP."""
    if ip is None:
        return b"\x02\x32" + value.to_bytes(8, "little")
    return b"\x02\xb2" + value.to_bytes(8, "little") + fup(ip)


def mode_exec(bits: int) -> bytes:
    return bytes([0x99, {64: 1, 32: 2, 16: 0}[bits]])


def mode_tsx(*, inside: bool, abort: bool = False) -> bytes:
    return bytes([0x99, 0x20 | inside | abort << 1])


def psb_plus(ip: int | None = None, *, time: int = 1000, bits: int = 64) -> bytes:
    """A PSB+ at ``ip``; without one tracing is off."""
    return PSB + tsc(time) + mode_exec(bits) + (b"" if ip is None else fup(ip)) + PSBEND
