"""Real programs and functions for the comparison with the kernel's uprobes.

Arguments are such as do not change from run to run: sizes, indices, descriptors, counters; never a pointer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")

PYTHON_PROGRAM = """
import json, re, threading, zlib
texts = [json.dumps({"n": list(range(n)), "s": "x" * n}) for n in range(200)]
def work(k):
    return sum(zlib.crc32(text.encode() * (k + 1)) for text in texts)
threads = [threading.Thread(target=lambda k=k: results.__setitem__(k, work(k))) for k in range(3)]
results = {}
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(results.values()), len(re.sub("[0-9]+", "n", "".join(texts))))
"""

SQL = """
create table t(a integer primary key, b text, c real);
with recursive n(i) as (select 1 union all select i + 1 from n where i < 3000)
insert into t select i, printf('%d-%s', i, hex(i)), i * 0.5 from n;
create index t_b on t(b);
select count(*), sum(length(b)), sum(c) from t;
select a, b from t where a % 7 = 3 order by b;
"""


@dataclass(frozen=True)
class Case:
    """``command`` runs; ``symbol`` of ``file`` is probed. ``args`` as a user of ptwprobe writes them, ``fetch`` the
    same for tracefs. ``{input}`` in the command is a file of 3 MiB, ``{NAME}`` a program of tests/progs.
    ``least``: hits that make the comparison worth something.
    """

    name: str
    command: tuple[str, ...]
    file: str
    symbol: str
    args: str
    fetch: str
    least: int = 100
    stdin: bytes = b""

    @property
    def where(self) -> str:
        return f"{Path(self.file).name}:{self.symbol}"


def _library(name: str) -> str:
    return str((LIBRARIES / name).resolve())


_PYTHON_COMMAND = ("/usr/bin/python3", "-I", "-S", "-c", PYTHON_PROGRAM)
_OPENSSL_COMMAND = ("/usr/bin/openssl", "dgst", "-sha256", "-hmac", "key", "{input}")

CASES = [
    Case(
        "python3 makes bytes",
        _PYTHON_COMMAND,
        "/usr/bin/python3.11",
        "PyBytes_FromStringAndSize",
        "size=$arg2:s64",
        "size=%si:s64",
    ),
    Case(
        "python3 makes text",
        _PYTHON_COMMAND,
        "/usr/bin/python3.11",
        "PyUnicode_New",
        "size=$arg1:s64 max=$arg2:u32",
        "size=%di:s64 max=%si:u32",
        least=10_000,
    ),
    Case(
        "python3 takes checksums in threads",
        _PYTHON_COMMAND,
        _library("libz.so.1"),
        "crc32",
        "crc=$arg1:u64 size=$arg3:u32",
        "crc=%di:u64 size=%dx:u32",
        least=600,
    ),
    Case(
        "sqlite3 reads columns",
        ("/usr/bin/sqlite3", ":memory:"),
        _library("libsqlite3.so.0"),
        "sqlite3_column_text",
        "i=$arg2:s32",
        "i=%si:s32",
        least=800,
        stdin=SQL.encode(),
    ),
    Case(
        "sqlite3 allocates",
        ("/usr/bin/sqlite3", ":memory:"),
        _library("libc.so.6"),
        "malloc",
        "size=$arg1:u64",
        "size=%di:u64",
        least=5_000,
        stdin=SQL.encode(),
    ),
    Case(
        "openssl digests",
        _OPENSSL_COMMAND,
        _library("libcrypto.so.3"),
        "EVP_DigestUpdate",
        "size=$arg3:u64",
        "size=%dx:u64",
        least=100,
    ),
    Case(
        "openssl looks at keys and values",
        _OPENSSL_COMMAND,
        _library("libcrypto.so.3"),
        "CRYPTO_malloc",
        "size=$arg1:u64 line=$arg3:s32",
        "size=%di:u64 line=%dx:s32",
        least=1_000,
    ),
    Case(
        "gzip reads",
        ("/usr/bin/gzip", "-c", "-n", "{input}"),
        _library("libc.so.6"),
        "read",
        "fd=$arg1:s32 size=$arg3:u64",
        "fd=%di:s32 size=%dx:u64",
        least=90,
    ),
    Case(
        "gzip writes",
        ("/usr/bin/gzip", "-c", "-n", "{input}"),
        _library("libc.so.6"),
        "write",
        "fd=$arg1:s32 size=$arg3:u64",
        "fd=%di:s32 size=%dx:u64",
        least=5,
    ),
    Case(
        "a C++ method",
        ("{cpp}", "20000"),
        "{cpp}",
        "_ZN4shop6Basket3putEli",
        "price=$arg2:s64 count=$arg3:s32",
        "price=%si:s64 count=%dx:s32",
        least=20_000,
    ),
    Case(
        "a C++ overload",
        ("{cpp}", "20000"),
        "{cpp}",
        "_ZN4shop3addEll",
        "a=$arg1:s64 b=$arg2:s64",
        "a=%di:s64 b=%si:s64",
        least=19_000,
    ),
    Case(
        "a C program with threads",
        ("{calls}", "4", "25000", "0"),
        "{calls}",
        "probe_me",
        "a=$arg1:s64 b=$arg2:s64",
        "a=%di:s64 b=%si:s64",
        least=100_000,
    ),
]


def fill_in(case: Case, progs: Callable[..., Path], input_file: Path) -> tuple[list[str], Path]:
    """The command and the probed file of ``case``, with programs and the input in their places."""

    def filled(word: str) -> str:
        if word == "{input}":
            return str(input_file)
        if word.startswith("{") and word.endswith("}") and "\n" not in word and os.sep not in word:
            return str(progs(word[1:-1]))
        return word

    return [filled(word) for word in case.command], Path(filled(case.file))


def write_input(path: Path) -> Path:
    """3 MiB that compress by half."""
    path.write_text("".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(49_152)))
    return path
