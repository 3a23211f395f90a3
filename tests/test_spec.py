"""The probe language: what parses to what, and where exactly an error points."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ptwprobe.errors import ProbeSyntaxError
from ptwprobe.model import Argument, Constant, Memory, Probe, Register, TypeKind, ValueType, Where
from ptwprobe.probe.spec import format, parse

RDI = Register("rdi")
RSP = Register("rsp")


def where(text: str) -> tuple[str | None, str | None, int, int | None]:
    w = parse(text).where
    return w.obj, w.function, w.offset, w.file_offset


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("malloc", (None, "malloc", 0, None)),
        ("libc:malloc", ("libc", "malloc", 0, None)),
        ("libc:malloc+0x1c", ("libc", "malloc", 0x1C, None)),
        ("libc:malloc+12", ("libc", "malloc", 12, None)),
        ("/usr/lib/a b/x.so:f".replace("a b", "ab"), ("/usr/lib/ab/x.so", "f", 0, None)),
        ("./prog:0x1139", ("./prog", None, 0, 0x1139)),
        ("libstdc++:std::terminate", ("libstdc++", "std::terminate", 0, None)),
        ("std::vector<int>::push_back", (None, "std::vector<int>::push_back", 0, None)),
        ("lib*:mem*", ("lib*", "mem*", 0, None)),
        ("'ns::f(int, char*)'+0x4", (None, "ns::f(int, char*)", 4, None)),
        ("'my lib.so':'it''s'", ("my lib.so", "it's", 0, None)),
        ("libx:::global", ("libx", "::global", 0, None)),
        ("a::operator+", (None, "a::operator+", 0, None)),
        ("a::operator++", (None, "a::operator++", 0, None)),
        ("operator==", (None, "operator==", 0, None)),
        ("a::operator%", (None, "a::operator%", 0, None)),
        ("'a+0x4'", (None, "a+0x4", 0, None)),
    ],
)
def test_where(text: str, expected: tuple[str | None, str | None, int, int | None]) -> None:
    assert where(text) == expected


def test_group_and_name() -> None:
    for text, group, name in (
        ("f", None, None),
        ("x=f", None, "x"),
        ("g/f", "g", None),
        ("g/x=f", "g", "x"),
        ("g/x=/usr/bin/prog:0x10", "g", "x"),
        ("g//usr/bin/prog:0x10", "g", None),
    ):
        probe = parse(text)
        assert (probe.group, probe.name) == (group, name), text
    assert parse("libc:f x=$arg1").name is None


@pytest.mark.parametrize(
    ("text", "fetch"),
    [
        ("%di", RDI),
        ("%rdi", RDI),
        ("%ax", Register("rax")),
        ("%r8", Register("r8")),
        ("%ip", Register("rip")),
        ("$arg1", RDI),
        ("$arg6", Register("r9")),
        ("$arg7", Memory(RSP, 8)),
        ("$arg9", Memory(RSP, 24)),
        ("$stack", RSP),
        ("$stack0", Memory(RSP, 0)),
        ("$stack3", Memory(RSP, 24)),
        ("\\42", Constant(42)),
        ("\\0x2a", Constant(42)),
        ("\\-1", Constant(0xFFFF_FFFF_FFFF_FFFF)),
        ("+8(%di)", Memory(RDI, 8)),
        ("+u8(%di)", Memory(RDI, 8)),
        ("-0x10(%rsp)", Memory(RSP, -16)),
        ("+0(+8(-16(%di)))", Memory(Memory(Memory(RDI, -16), 8), 0)),
        ("+0($arg7)", Memory(Memory(RSP, 8), 0)),
        ("+0(\\0x1000)", Memory(Constant(0x1000), 0)),
    ],
)
def test_fetch(text: str, fetch: object) -> None:
    (argument,) = parse(f"f {text}").arguments
    assert argument.fetch == fetch
    assert argument.text == text
    assert argument.entry_only == ("$arg" in text)
    assert str(argument.type) == "x64"


def test_types_and_names() -> None:
    arguments = parse("f a=%di:u8 %si:s16 +0(%dx):x32 $arg1 p=$arg2").arguments
    assert [a.name for a in arguments] == ["a", "arg2", "arg3", "arg1", "p"]
    assert [str(a.type) for a in arguments] == ["u8", "s16", "x32", "x64", "x64"]


def test_default_names_stay_unique() -> None:
    assert [a.name for a in parse("f $arg1 %si $arg1 arg2=%dx").arguments] == ["arg1", "arg2_1", "arg1_1", "arg2"]


def test_depth_and_number_of_arguments_are_bounded() -> None:
    def nested(depth: int) -> str:
        return "f " + "+0(" * depth + "%di" + ")" * depth

    parse(nested(16))
    with pytest.raises(ProbeSyntaxError, match="16 dereferences") as caught:
        parse(nested(17))
    assert caught.value.column == 2 + 16 * 3
    assert len(parse("f " + "%di " * 255).arguments) == 255
    with pytest.raises(ProbeSyntaxError, match="255 arguments") as caught:
        parse("f " + "%di " * 256)
    assert caught.value.column == 2 + 255 * 4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("p:grp/ev /bin/bash:0x4245c0 %ip a=%ax:u32", ("grp", "ev", "/bin/bash", 0x4245C0, True)),
        ("p:ev /bin/bash:4096", (None, "ev", "/bin/bash", 4096, True)),
        ("p:grp/ /bin/bash:010", ("grp", None, "/bin/bash", 8, True)),
        ("p /bin/bash:0x10", (None, None, "/bin/bash", 16, True)),
        ("ptw:g/e /bin/b:0x10 $stack1", ("g", "e", "/bin/b", 16, True)),
        ("ptw /bin/b:0x10%nopace%multinop +4(%di):u32", (None, None, "/bin/b", 16, False)),
        ("p:x bin/b:0x10", (None, "x", "./bin/b", 16, True)),
        ("p:x /odd:name:0x10", (None, "x", "/odd:name", 16, True)),
    ],
)
def test_tracefs_lines(line: str, expected: tuple[str | None, str | None, str, int, bool]) -> None:
    probe = parse(line)
    w = probe.where
    assert (probe.group, probe.name, w.obj, w.file_offset, probe.paced) == expected
    assert w.function is None
    again = parse(format(probe))
    assert (again.where.obj, again.where.file_offset, again.paced) == (w.obj, w.file_offset, probe.paced)


def test_functions_called_like_tracefs_words() -> None:
    assert where("p") == (None, "p", 0, None)
    assert where("r $arg1") == (None, "r", 0, None)
    assert where("'p':f") == ("p", "f", 0, None)
    assert where("p2:f") == ("p2", "f", 0, None)


# The caret stands under the character that the error points at.
ERRORS = """
malloc %eax                  | part of a register
       ^                     | %rax:u32
malloc %al                   | part of a register
       ^                     | %rax:u8
malloc %r8d                  | part of a register
       ^                     | %r8:u32
malloc %dil                  | part of a register
       ^                     | %rdi:u8
malloc %xmm0                 | not supported
       ^                     | integer
malloc %foo                  | no such register
       ^                     | %rax
f $retval                    | not supported
  ^                          | register
f $comm                      | not supported
  ^                          | register
f @sym                       | not supported
  ^                          | constant
f size->len                  | variable
  ^                          | register
f $arg0                      | no $arg0
  ^                          | $arg1
f $arg                       | number
  ^                          | $arg1
f $foo                       | no such value
  ^                          | $arg1
f %di:string                 | not supported
      ^                      | u64
f %di:u32[4]                 | not supported
      ^                      | u64
f %di:b4@0/8                 | not supported
      ^                      | u64
f %di:u7                     | no such type
      ^                      | u64
f %di:                       | no such type
      ^                      | u64
f +8(%di                     | ')' is missing
        ^                    | +OFF
f +8%di                      | '(' is missing
    ^                        | +OFF
f +8(                        | value is missing
     ^                       | register
f +(%di)                     | number is missing
   ^                         | decimal
f +0x(%di)                   | number is missing
     ^                       | decimal
f +4294967296(%di)           | 32 bits
  ^                          | base
f \\                          | number is missing
   ^                         | decimal
f \\18446744073709551616      | 64 bits
   ^                         | smaller
f \\"abc"                     | string
   ^                         | number
f %di,%si                    | ',' does not belong
     ^                       | spaces
p:libc:malloc %di            | no ':'
      ^                      | leave out the 'p:'
f 1=%di                      | C identifier
  ^                          | letters
f a-b=%di                    | '-' is not part
   ^                         | letters
f =%di                       | C identifier
  ^                          | letters
f a=                         | value is missing
    ^                        | register
f a=%di a=%si                | used twice
        ^                    | another name
f %di if a > 4               | condition
      ^                      | afterwards
libc:malloc%return           | %return
           ^                 | entry
libc:malloc%foo              | unknown suffix
           ^                 | %nopace
usdt:libc:setjmp             | USDT
^                            | OBJ:FUNC
libc:@malloc.c:12            | source line
     ^                       | OBJ:FUNC
@malloc.c:12                 | source line
^                            | OBJ:FUNC
libc:                        | function is missing
     ^                       | OBJ:FUNC
:malloc                      | object before
^                            | main program
a:b:c                        | second ':'
   ^                         | quote
libc:malloc+                 | not a number
            ^                | FUNC+0x1a
libc:malloc+0xg              | not a number
              ^              | FUNC+0x1a
libc:+0x10                   | before '+'
     ^                       | OBJ:FUNC
libc:4096                    | digit
     ^                       | hexadecimal
libc:0x12q                   | hexadecimal
         ^                   | OBJ:0x1234
0x1234                       | needs its object
^                            | OBJ:0x1234
g/bin/prog:f                 | relative path
  ^                          | ./
my-name=f                    | '-' is not part
  ^                          | letters
'abc                         | not closed
^                            | '
libc:''                      | nothing between
     ^                       | name
x=                           | place of the probe
  ^                          | FUNC
$arg1                        | no function
^                            | FUNC
r:x /bin/b:0x10              | return probe
^                            | entry
r8:x /bin/b:0x10             | return probe
^                            | entry
p:a-b /bin/b:0x10            | '-' is not part
   ^                         | letters
p:x /bin/b                   | PATH:OFFSET
    ^                        | tracefs
p:x /bin/b:main              | not a number
           ^                 | tracefs
p:x /bin/b:0x10(0x20)        | reference counter
               ^             | tracefs
p:x /bin/b:0x10%return       | %return
               ^             | ptw:
p:x                          | PATH:OFFSET
   ^                         | tracefs
-:x                          | removes
^                            | FUNC
""".replace("\\\\", "\\")


def error_cases() -> list[tuple[str, int, str, str]]:
    lines = ERRORS.strip("\n").split("\n")
    out = []
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        text, message = (part.strip() for part in first.split(" | "))
        caret, hint = second.split(" | ")
        out.append((text, caret.index("^"), message, hint.strip()))
    return out


@pytest.mark.parametrize(("text", "column", "message", "hint"), error_cases())
def test_errors_point_at_the_column(text: str, column: int, message: str, hint: str) -> None:
    with pytest.raises(ProbeSyntaxError) as caught:
        parse(text)
    error = caught.value
    assert (error.column, error.text) == (column, text)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize("text", ["", "   ", "f\0", "f \x1b[0m"])
def test_empty_and_unprintable_text(text: str) -> None:
    with pytest.raises(ProbeSyntaxError):
        parse(text)


# ---------------------------------------------------------------- properties

identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.isprintable)
types = st.builds(ValueType, st.sampled_from(TypeKind), st.sampled_from([8, 16, 32, 64]))
leaves = st.one_of(
    st.sampled_from(["%di", "%rax", "%r15", "%ip", "$stack", "$stack7", "$arg1", "$arg6", "$arg7"]),
    st.integers(-(1 << 63), (1 << 64) - 1).map(lambda value: f"\\{value}"),
    st.integers(0, (1 << 64) - 1).map(lambda value: f"\\{value:#x}"),
)
fetches = st.recursive(
    leaves,
    lambda inner: st.builds(lambda off, base: f"{off:+d}({base})", st.integers(-(1 << 31), (1 << 31) - 1), inner),
    max_leaves=8,
)


@st.composite
def probes(draw: st.DrawFn) -> Probe:
    """Any probe in canonical form: its text is what ``format`` gives."""
    chosen = draw(st.lists(identifiers, max_size=9, unique=True))
    arguments = []
    for name in chosen:
        text = draw(fetches)
        fetched = parse(f"f {text}").arguments[0]
        arguments.append(Argument(name, fetched.fetch, draw(types), text, fetched.entry_only))
    objects = names.filter(lambda name: "/" not in name or name.startswith(("/", "./", "../")))
    group, event = draw(st.none() | identifiers), draw(st.none() | identifiers.filter(lambda n: n != "operator"))
    offset = draw(st.integers(0, (1 << 63) - 1))
    if draw(st.booleans()):
        place = Where(draw(st.none() | objects), draw(names), offset)
    else:
        place = Where(draw(objects), None, 0, offset)
    probe = Probe("", place, tuple(arguments), group, event, draw(st.booleans()))
    text = format(probe)
    return parse_shape(probe, text)


def parse_shape(probe: Probe, text: str) -> Probe:
    """``probe`` with the text, and the column at which its WHERE stands in it."""
    column = len(f"{probe.group}/" if probe.group else "") + len(f"{probe.name}=" if probe.name else "")
    w = probe.where
    first_is_quoted = text[column] == "'"
    place = Where(w.obj, w.function, w.offset, w.file_offset, column + first_is_quoted)
    return Probe(text, place, probe.arguments, probe.group, probe.name, probe.paced)


@given(probes())
def test_parsing_the_canonical_text_gives_the_same_probe(probe: Probe) -> None:
    assert parse(format(probe)) == probe


grammar = st.text(alphabet=string.ascii_letters[:8] + "09x:=+-()%$\\@/'*? \t~<>,.&", max_size=60)
PIECES = """
p: ptw: libc: malloc +0x 1 $arg $stack %di +8( ) :u32 = ' / :: operator %nopace %return if \\ - @ usdt: 0x [ … ² é
"""
words = st.lists(st.sampled_from([*PIECES.split(), " ", "\n"]), max_size=14).map("".join)


@given(st.one_of(st.text(max_size=60), grammar, words))
@example("p: /:²")
@example("f \\²")
@example("²:²")
def test_garbage_raises_syntax_errors_only(text: str) -> None:
    try:
        probe = parse(text)
    except ProbeSyntaxError as error:
        assert 0 <= error.column <= len(text)
        assert error.hint
        assert str(error)
    else:
        canonical = format(probe)
        again = parse(canonical)
        assert format(again) == canonical
        assert (again.arguments, again.group, again.name) == (probe.arguments, probe.group, probe.name)
