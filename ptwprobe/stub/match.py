"""Reads a stub back from memory: what undo and crash recovery look at before they touch a site.

The templates' patterns give the fields; the fields and the tail behind the stub give a request; and only where that
request assembles to the very bytes that are there, they are a stub. So a match is exact and its result a whole
:class:`~ptwprobe.model.Stub`. What the bytes do not hold is not in its request: names and texts of arguments, and the
difference of ``u`` and ``x`` types.
"""

from __future__ import annotations

from .. import _native
from ..errors import StubError
from ..model import (
    Argument,
    Constant,
    Fetch,
    Memory,
    Register,
    RingLayout,
    Stub,
    StubForm,
    StubRequest,
    ThreadIdSource,
    TypeKind,
    ValueType,
)
from .assemble import MAX_WORDS, TAIL, assemble
from .encode import REGISTERS
from .forms import CONTROL_BLOCKS, HEADER_MAGIC
from .operands import FRAMES, PARTS, U64, load_texts, move_texts
from .template import pattern

QUAD = 8

_NARROW_TYPES = tuple(ValueType(kind, bits) for kind in (TypeKind.UNSIGNED, TypeKind.SIGNED) for bits in (8, 16, 32))


class _Mismatch(Exception):
    """These bytes are no stub."""


def match_stub(code: bytes, addr: int) -> Stub | None:
    """The stub that starts at ``addr``, where memory holds ``code`` (which may go on behind it), or None."""
    for parse in (_ring_request, _pt_request):
        try:
            stub = assemble(parse(_Reader(code, addr)))
        except (_Mismatch, StubError, _native.NativeError):
            continue
        if code.startswith(stub.code):
            return stub
    return None


class _Reader:
    """Takes one template after the other from the code."""

    def __init__(self, code: bytes, addr: int) -> None:
        self.code = code
        self.addr = addr
        self.offset = 0

    def maybe(self, template: str, **texts: str) -> dict[str, int] | None:
        made = pattern(template, **texts)
        values = made.match(self.code, self.addr + self.offset, self.offset)
        if values is not None:
            self.offset += made.size
        return values

    def take(self, template: str, **texts: str) -> dict[str, int]:
        values = self.maybe(template, **texts)
        if values is None:
            raise _Mismatch
        return values

    def bytes(self, addr: int, size: int) -> bytes:
        """Data at an address that a field gave."""
        offset = addr - self.addr
        if not 0 <= offset <= len(self.code) - size:
            raise _Mismatch
        return self.code[offset : offset + size]

    def quad(self, addr: int) -> int:
        return int.from_bytes(self.bytes(addr, QUAD), "little")


class _Words:
    """Reads the code of words back into arguments, and what the load gates among it say."""

    def __init__(self, reader: _Reader, form: StubForm) -> None:
        self.loads = 0
        self.gate: dict[str, int] = {}
        self.arguments: list[Argument] = []
        self._reader = reader
        self._form = form
        self._frame = FRAMES[form]

    def add(self, fetch: Fetch, type: ValueType) -> None:
        self.arguments.append(Argument("", fetch, type, ""))

    def register_name(self, slot: int) -> str:
        for name, offset in self._frame.slots.items():
            if offset == slot:
                return name
        raise _Mismatch

    def take(self, store: str) -> None:
        """One word, up to the template ``store`` that puts it out."""
        value: Fetch | None = None
        type = U64
        loads = False
        while True:
            for register in REGISTERS:
                if self._reader.maybe(store, value=register) is not None:
                    self.add(value or Register(register), type)
                    self.loads += loads
                    return
            pointer = self._far_pointer(value)
            self._skip_pointer_check()
            gate = self._reader.maybe(f"{self._form.value}_load_gate")
            if gate is not None:
                self.gate = gate
                loads = True
                type, base, offset = self._load()
                value = pointer or Memory(*self._based(base, value, offset))
            elif pointer is not None:
                raise _Mismatch
            else:
                value, type = self._plain(value)

    def _skip_pointer_check(self) -> None:
        """It has the base and offset of the load that follows."""
        if self._form is StubForm.RING:
            any(self._reader.maybe("ring_pointer", base=base) is not None for base in REGISTERS)

    def _plain(self, value: Fetch | None) -> tuple[Fetch, ValueType]:
        """A value that no pointer leads to."""
        constant = self._reader.maybe("value_constant")
        if constant is not None:
            return Constant(constant["value"]), U64
        if self._reader.maybe("value_stack") is not None:
            return Register("rsp"), U64
        for type in _NARROW_TYPES:
            for name, parts in PARTS.items():
                if self._reader.maybe("value_narrow", **move_texts(type), part=parts[type.bits]) is not None:
                    return value or Register(name), type
        type, base, slot = self._load()
        if base != "rsp":
            raise _Mismatch
        return Register(self.register_name(slot)), type

    def _far_pointer(self, value: Fetch | None) -> Memory | None:
        for base in REGISTERS:
            found = self._reader.maybe("far_address", base=base, scratch=self._frame.scratch)
            if found is not None:
                offset = found["offset"]
                return Memory(*self._based(base, value, offset - (offset >> 63 << 64)))
        return None

    def _based(self, base: str, value: Fetch | None, offset: int) -> tuple[Fetch, int]:
        if base == "rsp":
            return Register("rsp"), offset - self._frame.size
        return (value if base == "rax" and value is not None else Register(base)), offset

    def _load(self) -> tuple[ValueType, str, int]:
        for type in (U64, *_NARROW_TYPES):
            for base in REGISTERS:
                found = self._reader.maybe("load", **load_texts(type, base))
                if found is not None:
                    return type, base, found["offset"]
        raise _Mismatch


def _ring_request(reader: _Reader) -> StubRequest:
    gate = reader.take("ring_enter")["gate"]
    rdpid = reader.maybe("ring_cpu_rdpid") is not None
    if not rdpid:
        reader.take("ring_cpu_rdtscp")
    place = reader.take("ring_locate")
    if not place["window_bits"]:
        raise _Mismatch
    full_addr = reader.take("ring_reserve")["full"]
    reader.take("ring_record")
    tls = reader.maybe("ring_thread_tls_field")
    if tls is None:
        reader.take("ring_thread_fs_base")
    header = reader.take("ring_header")["header"]
    words = _Words(reader, StubForm.RING)
    for _ in range(_word_count(header >> 16)):
        words.take("ring_store")
    behind = full_addr + pattern("ring_full").size + pattern("ring_no_ring").size
    offset = tls["offset"] if tls else 0
    ring = RingLayout(
        control_addr=place["control"] - CONTROL_BLOCKS,
        data_addr=place["data"],
        rings=place["rings"],
        ring_bits=place["window_bits"] - 1,
        gate_addr=gate,
        load_gate_addr=words.gate.get("gate", 0),
        load_gate_value=words.gate.get("value", 0),
        thread_id=ThreadIdSource.FS_BASE if tls is None else ThreadIdSource.TLS_FIELD,
        thread_id_offset=offset - (offset >> 63 << 64),
        use_rdpid=rdpid,
    )
    tail_addr = behind + words.loads * pattern("ring_fault").size
    return _request(reader, StubForm.RING, header & 0xFFFF, words, tail_addr, ring)


def _pt_request(reader: _Reader) -> StubRequest:
    reader.maybe("pt_enter")
    paced = reader.maybe("pace") is not None
    literal_addr = reader.take("pt_word_literal")["literal"]
    header = reader.quad(literal_addr)
    if header & 0xFF_FFFF_FFFF != HEADER_MAGIC:
        raise _Mismatch
    words = _Words(reader, StubForm.PT)
    literals = 1
    for _ in range(_word_count(header >> 40 & 0xFF)):
        if paced:
            reader.take("pace")
        if (literal := reader.maybe("pt_word_literal")) is not None:
            literals += 1
            words.add(Constant(reader.quad(literal["literal"])), U64)
        elif (saved := reader.maybe("pt_word_saved")) is not None:
            words.add(Register(words.register_name(saved["offset"])), U64)
        else:
            words.take("pt_word_register")
    gate = words.gate
    ring = RingLayout(
        control_addr=0,
        data_addr=0,
        rings=0,
        ring_bits=0,
        gate_addr=gate.get("gate", 0),
        load_gate_addr=gate.get("load_gate", 0),
        load_gate_value=-gate.get("minus_value", 0) & 0xFFFF_FFFF,
        thread_id=ThreadIdSource.FS_BASE,
        thread_id_offset=0,
        use_rdpid=False,
    )
    tail_addr = literal_addr + literals * QUAD
    return _request(reader, StubForm.PT, header >> 48, words, tail_addr, ring if gate else None, paced)


def _word_count(count: int) -> int:
    if count > MAX_WORDS:
        raise _Mismatch
    return count


def _request(
    reader: _Reader,
    form: StubForm,
    event_id: int,
    words: _Words,
    tail_addr: int,
    ring: RingLayout | None,
    paced: bool = True,
) -> StubRequest:
    site_addr, continue_addr, length = TAIL.unpack(reader.bytes(tail_addr, TAIL.size))
    displaced = reader.bytes(tail_addr + TAIL.size, length)
    return StubRequest(
        form=form,
        event_id=event_id,
        arguments=tuple(words.arguments),
        stub_addr=reader.addr,
        site_addr=site_addr,
        displaced=displaced,
        continue_addr=continue_addr,
        paced=paced,
        ring=ring,
    )
