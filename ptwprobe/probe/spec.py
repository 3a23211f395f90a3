"""The probe language: text → :class:`~ptwprobe.model.Probe`, and back to canonical text.

    [GRP/][NAME=]WHERE ARG...      WHERE: FUNC[+0xOFF] | OBJ:FUNC[+0xOFF] | OBJ:0xFILEOFFSET, then %nopace, %multinop

and lines in tracefs form, ``p[:[GRP/][EVENT]] PATH:OFFSET ARG...`` and ``ptw[:…] PATH:OFFSET[%nopace] ARG...``.
``'...'`` takes a name literally, with its spaces and separators (``''`` inside is one quote). ARG is ``fetch.py``;
what a WHERE means in a process is ``elf.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ptwprobe.errors import ProbeSyntaxError
from ptwprobe.model import Probe, Where
from ptwprobe.probe.fetch import check_identifier, format_argument, parse_arguments

_NOT_YET = "is not supported by this version"
_WHERE_HINT = "write FUNC, OBJ:FUNC+0xOFF or OBJ:0xFILEOFFSET"
_QUOTED = "\x01"
"""Stands in a masked text for every character that was quoted; no text contains it."""
_MAX_OFFSET = (1 << 63) - 1
_TRACEFS_LINE = re.compile(r"(p|ptw|r\d*)(:\S*)?(?=\s|$)", re.ASCII)
_SUFFIX = re.compile(r"%([A-Za-z_]*)$")
_PLAIN_FUNCTION = re.compile(r"[A-Za-z_*?][\w.*?]*(::~?[A-Za-z_*?][\w.*?]*)*", re.ASCII)
_PLAIN_OBJECT = re.compile(r"(\.{0,2}/)?[A-Za-z_*?0-9][\w.+*?/-]*", re.ASCII)
_RESERVED = re.compile(r"p|ptw|usdt|r\d*", re.ASCII)


@dataclass(frozen=True)
class _Word:
    """A word without its quotes: ``mask`` is ``value`` with every quoted character as ``_QUOTED``; ``columns`` has
    the column in the probe's text for each character, and one more for the end."""

    text: str
    value: str
    mask: str
    columns: tuple[int, ...]

    def slice(self, start: int, end: int | None = None) -> _Word:
        end = len(self.value) if end is None else end
        return _Word(self.text, self.value[start:end], self.mask[start:end], self.columns[start : end + 1])

    def error(self, index: int, message: str, hint: str) -> ProbeSyntaxError:
        return ProbeSyntaxError(self.text, self.columns[index], message, hint)


def parse(text: str) -> Probe:
    """The probe that ``text`` says.

    Raises:
        ProbeSyntaxError: with the 0-based column of the character where it goes wrong.
    """
    for column, char in enumerate(text):
        if not char.isprintable() and char not in "\t\n":
            raise ProbeSyntaxError(text, column, f"the character {char!r} is not allowed", "remove it")
    start = len(text) - len(text.lstrip())
    if start == len(text):
        raise ProbeSyntaxError(text, start, "an empty probe", _WHERE_HINT)
    line = _TRACEFS_LINE.match(text, start)
    if line and (line[2] or re.match(r"\s+\S*/\S*:", text[line.end() :])):
        return _parse_tracefs(text, line)
    if text.startswith("-:", start):
        raise ProbeSyntaxError(text, start, "this removes an event, it is no probe", _WHERE_HINT)
    word, rest = _read_word(text, start)
    group, name, word = _event_prefix(word)
    if not word.value:
        raise word.error(0, "the place of the probe is missing", _WHERE_HINT)
    where, paced = _where(word)
    return Probe(text, where, parse_arguments(text, _spans(text, rest)), group, name, paced)


def _spans(text: str, start: int) -> list[tuple[int, int]]:
    spans = [found.span() for found in re.compile(r"\S+").finditer(text, start)]
    for begin, end in spans:
        if text[begin:end] == "if":
            raise ProbeSyntaxError(text, begin, f"a condition {_NOT_YET}", "filter the hits afterwards")
    return spans


def _read_word(text: str, start: int) -> tuple[_Word, int]:
    """The word at ``start`` up to white space outside quotes, and the column where it ends."""
    value, mask, columns, pos, opened = [], [], [], start, -1
    while pos < len(text):
        char = text[pos]
        if char == "'" and opened >= 0 and text.startswith("''", pos):
            value.append(char)
            mask.append(_QUOTED)
            columns.append(pos)
            pos += 1
        elif char == "'":
            if opened >= 0 and pos == opened + 1:
                raise ProbeSyntaxError(text, opened, "nothing between the quotes", "put a name there")
            opened = -1 if opened >= 0 else pos
        elif char.isspace() and opened < 0:
            break
        else:
            value.append(char)
            mask.append(char if opened < 0 else _QUOTED)
            columns.append(pos)
        pos += 1
    if opened >= 0:
        raise ProbeSyntaxError(text, opened, "this quote is not closed", "add a ' after the name")
    return _Word(text, "".join(value), "".join(mask), (*columns, pos)), pos


def _event_prefix(word: _Word) -> tuple[str | None, str | None, _Word]:
    group = name = None
    found = re.match(r"[A-Za-z_]\w*/", word.mask, re.ASCII)
    if found:
        group, word = found.group()[:-1], word.slice(found.end())
    equals = word.mask.find("=")
    before = word.mask[:equals] if equals >= 0 else ""
    if equals >= 0 and not re.search(rf"operator|[:(<+/{_QUOTED}]", before):
        check_identifier(word.text, word.columns[0], word.columns[equals], "the name of an event")
        name, word = before, word.slice(equals + 1)
    return group, name, word


def _where(word: _Word) -> tuple[Where, bool]:
    column = word.columns[0]
    place, paced = _suffixes(word)
    if place.mask.startswith("@"):
        raise place.error(0, f"a source line (@file:line) {_NOT_YET}", _WHERE_HINT)
    separator = re.search(r"(?<!:):(?!:)|(?<!:):(?=::[^:])", place.mask)
    obj = None
    if separator:
        obj = _object(place.slice(0, separator.start()))
        place = place.slice(separator.end())
    if place.mask.startswith("@"):
        raise place.error(0, f"a source line (@file:line) {_NOT_YET}", _WHERE_HINT)
    if not place.value:
        raise place.error(0, "the function is missing", _WHERE_HINT)
    if place.mask[0].isdigit():
        return Where(obj, None, 0, _file_offset(place, obj), column), paced
    function, offset = _function(place)
    return Where(obj, function, offset, None, column), paced


def _suffixes(word: _Word) -> tuple[_Word, bool]:
    """``word`` without its %suffixes, and whether the probe is paced."""
    paced = True
    while (found := _SUFFIX.search(word.mask)) and not word.mask[: found.start()].endswith("operator"):
        suffix = found[1]
        if suffix == "return":
            raise word.error(found.start(), f"a return probe (%return) {_NOT_YET}", "probe the function's entry")
        if suffix not in ("nopace", "multinop"):
            raise word.error(found.start(), f"unknown suffix %{suffix}", "known are %nopace and %multinop")
        # %multinop allows a run of 1-byte NOPs as a site, which is always allowed here.
        paced = paced and suffix != "nopace"
        word = word.slice(0, found.start())
    if not word.value:
        raise word.error(0, "the place of the probe is missing", _WHERE_HINT)
    return word, paced


def _object(word: _Word) -> str:
    if not word.value:
        raise word.error(0, "the object before ':' is missing", "leave out the ':' for the main program")
    if word.mask == "usdt":
        raise word.error(0, f"a USDT marker (usdt:) {_NOT_YET}", _WHERE_HINT)
    if "/" in word.mask and not re.match(r"/|\.{1,2}/|[*?]|" + _QUOTED, word.mask):
        raise word.error(0, "a relative path starts with ./", f"write ./{word.value}, or a path from /")
    return word.value


def _file_offset(word: _Word, obj: str | None) -> int:
    found = re.match(r"0[xX]([0-9A-Fa-f]*)", word.mask)
    if found is None:
        raise word.error(0, "a function name does not start with a digit", "a file offset is hexadecimal: OBJ:0x1234")
    if found.end() != len(word.value) or not found[1]:
        raise word.error(found.end(), "this is not a hexadecimal number", "a file offset is OBJ:0x1234")
    if obj is None:
        raise word.error(0, "a file offset needs its object", f"write OBJ:{word.value[:20]}")
    offset = int(found[1], 16)
    if offset > _MAX_OFFSET:
        raise word.error(0, "the file offset does not fit in 63 bits", "take a smaller one")
    return offset


def _function(word: _Word) -> tuple[str, int]:
    plus = word.mask.rfind("+")
    if plus < 0 or re.search(r"operator\+*$", word.mask[:plus]):
        return _function_name(word), 0
    digits = word.mask[plus + 1 :]
    found = re.match(r"0[xX]([0-9A-Fa-f]*)|([0-9]+)", digits)
    number = (found[1] or found[2] or "") if found else ""
    if found is None or not number or found.end() != len(digits):
        column = plus + 1 + (found.end() if found else 0)
        raise word.error(column, "this is not a number", "an offset into a function is FUNC+0x1a, in bytes")
    if plus == 0:
        raise word.error(0, "the function before '+' is missing", _WHERE_HINT)
    offset = int(number[:40], 16 if found[2] is None else 10)
    if offset > _MAX_OFFSET:
        raise word.error(plus + 1, "the offset does not fit in 63 bits", "take a smaller one")
    return _function_name(word.slice(0, plus)), offset


def _function_name(word: _Word) -> str:
    bad = re.search(r"(?<!:):(?!:)|:{3,}", word.mask)
    if bad:
        raise word.error(bad.start(), "a second ':'", "write OBJ:FUNC; quote a name that contains ':' with '…'")
    if re.match(r"[-+$\\=%]", word.mask):
        raise word.error(0, f"no function starts with {word.value[0]!r}", _WHERE_HINT)
    return word.value


def _parse_tracefs(text: str, line: re.Match[str]) -> Probe:
    if line[1].startswith("r"):
        raise ProbeSyntaxError(text, line.start(), f"a return probe (r:) {_NOT_YET}", "probe the function's entry: p:")
    if line[2] and ":" in line[2][1:]:
        column = text.index(":", line.start(2) + 1)
        hint = f"a tracefs line has a space before its PATH:0xOFFSET; for OBJ:FUNC leave out the '{line[1]}:'"
        raise ProbeSyntaxError(text, column, "the name of an event has no ':'", hint)
    group, name = _tracefs_event(text, line.start(2) + 1, line.end(2)) if line[2] else (None, None)
    place = re.compile(r"\s*(\S*)").match(text, line.end())
    assert place is not None
    start, end = place.span(1)
    where_end, paced = end, True
    while (found := _SUFFIX.search(text[start:where_end])) is not None:
        suffix, column = found[1], start + found.start()
        if line[1] != "ptw" or suffix not in ("nopace", "multinop"):
            message = f"a return probe (%return) {_NOT_YET}" if suffix == "return" else f"unknown suffix %{suffix}"
            raise ProbeSyntaxError(text, column, message, "ptw: lines know %nopace and %multinop")
        paced = paced and suffix != "nopace"
        where_end = column
    where = _tracefs_where(text, start, where_end)
    return Probe(text, where, parse_arguments(text, _spans(text, end)), group, name, paced)


def _tracefs_event(text: str, start: int, end: int) -> tuple[str | None, str | None]:
    """The group and event of ``[GRP/][EVENT]`` (tracefs takes a '.' for the '/' too)."""
    found = re.compile(r"[/.]").search(text, start, end)
    group = None
    if found:
        group = check_identifier(text, start, found.start(), "the group of an event")
        start = found.end()
    name = check_identifier(text, start, end, "the name of an event") if start < end else None
    return group, name


def _tracefs_where(text: str, start: int, end: int) -> Where:
    colon = text.rfind(":", start, end)
    hint = "a tracefs line reads p:[GRP/]EVENT PATH:0xOFFSET ARG..."
    if colon <= start:
        raise ProbeSyntaxError(text, start, "PATH:OFFSET is missing", hint)
    found = re.compile(r"0[xX][0-9A-Fa-f]+|0[0-7]*|[1-9][0-9]*").match(text, colon + 1, end)
    if found is None or found.end() != end:
        column = found.end() if found else colon + 1
        if text[column:end].startswith("("):
            raise ProbeSyntaxError(text, column, f"a reference counter {_NOT_YET}", hint)
        raise ProbeSyntaxError(text, column, "this is not a number", hint)
    digits = found.group()
    # As the kernel's kstrtoul() with base 0: a leading 0 makes it octal.
    offset = int(digits, 8) if re.fullmatch("0[0-7]+", digits) else int(digits, 0)
    if offset > _MAX_OFFSET:
        raise ProbeSyntaxError(text, colon + 1, "the file offset does not fit in 63 bits", hint)
    path = text[start:colon]
    if "/" in path and not re.match(r"/|\.{1,2}/", path):
        path = f"./{path}"
    return Where(path, None, 0, offset, start)


def format(probe: Probe) -> str:
    """Canonical text of ``probe``: one spelling, all names and types said. Parsing it gives the same probe again."""
    where = probe.where
    words = f"{probe.group}/" if probe.group else ""
    words += f"{probe.name}=" if probe.name else ""
    if where.obj is not None:
        words += (where.obj if _is_plain_object(where.obj) else _quote(where.obj)) + ":"
    if where.file_offset is not None:
        words += f"{where.file_offset:#x}"
    else:
        function = where.function or ""
        plain = _is_plain_function(function) and not (where.obj is None and _RESERVED.fullmatch(function))
        words += function if plain else _quote(function)
        words += f"+{where.offset:#x}" if where.offset else ""
    words += "" if probe.paced else "%nopace"
    return " ".join([words, *(format_argument(argument) for argument in probe.arguments)])


def _quote(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


def _is_plain_object(obj: str) -> bool:
    """Whether it needs no quotes. A leading "IDENT/" would be read as a group."""
    return bool(_PLAIN_OBJECT.fullmatch(obj)) and not _RESERVED.fullmatch(obj) and not re.match(r"[A-Za-z_]\w*/", obj)


def _is_plain_function(function: str) -> bool:
    """Whether it needs no quotes. What follows "operator" would be read as part of its name."""
    return bool(_PLAIN_FUNCTION.fullmatch(function)) and not function.endswith("operator")
