"""``tolerance``: what PTWRITEs in a stub that the kernel patched in cost a decoder, for ours and the stock decoders.

A trace of 4 MB with about 69 hits, of one or two words each. "invisible": the stub's bytes are not to be had, and the
code at the site is that of the file; "visible": the trace names a file that has them, and the patched code of the site;
"interrupted": invisible, and interrupts come inside the stub. Told are the share of words that are found, and the taken
branches outside stubs that are not found, per hit. Losses are true of every machine; there is no time here.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from tests.bench import decoder
from tests.bench.table import Result, Row, Verdict
from tests.bench.traces import Trace, generate
from tests.peers.flow import PAIR, Decoded, Lists, common
from tests.peers.ipt import Ipt
from tests.peers.perfpt import PerfPt

MEGABYTES = 4
HITS = 69
STUBS = ["invisible", "visible", "interrupted"]
PERIODS_KB = [4, 16]
WORDS = [1, 2]
KEPT, LOST = "words kept", "branches lost per hit"


def run(runs: int) -> Result:
    """Once: the same files give the same losses, however often."""
    del runs
    result = Result("tolerance", by_case=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for stubs in STUBS:
            for period_kb in PERIODS_KB:
                for words in WORDS:
                    case = f"{stubs}, PSB {period_kb} K, {words} word{'s' * (words > 1)}"
                    # One at a time: they and what decoders make of them are hundreds of MB.
                    trace = make(folder / "trace", stubs, period_kb, words)
                    compare(folder, case, trace, words, result)
    result.verdicts = verdicts(result)
    return result


def make(folder: Path, stubs: str, period_kb: int, words: int) -> Trace:
    """With compressed returns, as CPUs write them unless they are told otherwise: a decoder that is lost waits longer
    for an address."""
    shown = "visible" if stubs == "visible" else "invisible"
    flags = ["stub-break"] if stubs == "interrupted" else []
    options = {"psb": period_kb * 1024, "hits": HITS, "words": words, "stubs": shown, "with": "retc"}
    return generate(folder, "tolerance", MEGABYTES, *flags, **options)


def compare(folder: Path, case: str, trace: Trace, words: int, result: Result) -> None:
    truth = trace.truth()
    true_values = Counter(hit.value for hit in truth.hits)
    stubs = [stub[:2] for stub in trace.stubs]
    true_pairs = truth.branches.pairs(stubs)
    for who, why in (("perf", PerfPt.missing()), ("libipt", Ipt.missing()), (decoder.NAME, "")):
        if why:
            if f"{who}: {why}" not in result.notes:
                result.notes.append(f"{who}: {why}")
            continue
        found = lists_of(folder, who, trace)
        kept = (Counter(hit.value for hit in found.hits) & true_values).total() / true_values.total()
        lost = len(true_pairs) // PAIR - common(true_pairs, found.branches.pairs(stubs))
        result.rows.append(Row(f"{case}: {KEPT}", who, "%", (round(100 * kept, 3),)))
        result.rows.append(Row(f"{case}: {LOST}", who, "branches", (round(lost * words / len(truth.hits), 2),)))


def lists_of(folder: Path, who: str, trace: Trace) -> Lists:
    if who == decoder.NAME:
        return decoder.lists(trace)
    decoded: Decoded
    if who == "perf":
        decoded = PerfPt(folder).decode(trace.perf_data, "bwe", lists=True)
    else:
        decoded = Ipt(folder).decode("insns", trace.aux, trace.images, lists=True)
    assert decoded.lists
    return decoded.lists


def verdicts(result: Result) -> list[Verdict]:
    found = []
    for row in result.rows:
        if row.who != decoder.NAME:
            continue
        bound = 100.0 if row.case.endswith(KEPT) else 0.0
        text = f"{row.who}: {row.case}: {row.value:,.2f} {row.unit}; bound {bound:,.0f}"
        found.append(Verdict(row.value == bound, text))
    return found
