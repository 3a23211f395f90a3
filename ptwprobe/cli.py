"""The command line: words in, exit code out. Every verb is a thin call of the stage that does the work.

The verbs, their options, outputs and exit codes are a contract that other tools rely on.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click as plain_click
import rich_click as click

from ptwprobe.errors import (
    EXIT_OK,
    EXIT_TARGET,
    EXIT_TRACE_ERRORS,
    EXIT_USAGE,
    PtwprobeError,
    ResolveError,
    UsageError,
)
from ptwprobe.model import Totals

click.rich_click.TEXT_MARKUP = "markdown"
CLOSED_BY_TOTALS = ("record", "script", "demo")
"""The verbs whose last line on stderr is always the totals."""
_CONTEXT = {"help_option_names": ["-h", "--help"]}


def say(text: str) -> None:
    """A line for the user on stderr."""
    click.echo(f"ptwprobe: {text}", err=True)


def show_error(error: PtwprobeError) -> None:
    """An error as every verb shows it: what, where, remedy."""
    say(f"error: {error}")
    if error.hint:
        click.echo(f"  hint: {error.hint}", err=True)


@contextmanager
def closing_line() -> Iterator[Callable[[Totals], None]]:
    """Whatever happens, the totals are the last line on stderr."""
    totals = Totals()

    def keep(value: Totals) -> None:
        nonlocal totals
        totals = value

    try:
        yield keep
    except PtwprobeError as error:
        show_error(error)
        raise SystemExit(error.exit_code) from error
    finally:
        click.echo(str(totals), err=True)


@click.group(context_settings=_CONTEXT)
@click.version_option(package_name="ptwprobe")
def cli() -> None:
    """Probe running x86-64 Linux programs without traps."""


# ---------------------------------------------------------------- what works here


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="one JSON object instead of text")
def doctor(as_json: bool) -> None:
    """What works on this machine, and the remedy for what does not."""
    from ptwprobe import doctor as checks

    click.echo(checks.report(as_json))


# ---------------------------------------------------------------- looking


def one_of(pid: int | None, file: str | None) -> None:
    """``-p`` and ``-x`` exclude each other, and one is needed."""
    if (pid is None) == (file is None):
        raise UsageError("give either -p PID or -x FILE")


@cli.command(name="list")
@click.option("-p", "--pid", type=int, help="a running process")
@click.option("-x", "--exec", "file", type=click.Path(), help="a program or library")
@click.option("--sites", is_flag=True, help="say for each function how it would be patched, or why not")
@click.option("--json", "as_json", is_flag=True, help="one JSON object a line")
@click.argument("pattern", required=False)
def list_(pid: int | None, file: str | None, sites: bool, as_json: bool, pattern: str | None) -> None:
    """Functions that can be probed; PATTERN is [OBJ:]FUNC with globs."""
    from ptwprobe.listing import rows

    one_of(pid, file)
    found = 0
    for row in rows(pid, file, pattern, sites):
        found += 1
        click.echo(json.dumps(row.as_json()) if as_json else row.as_text())
    if not found:
        raise ResolveError(
            f"no function matches '{pattern or '*'}'",
            "patterns are [OBJ:]FUNC with * and ?; a stripped program has no names: probe OBJ:0xFILEOFFSET",
        )


@cli.command()
@click.option("-p", "--pid", type=int, help="a running process")
@click.option("-x", "--exec", "file", type=click.Path(), help="a program or library")
@click.option("--form", type=click.Choice(["ring", "pt"]), default="ring", show_default=True, help="form of the stub")
@click.argument("probe")
def stub(pid: int | None, file: str | None, form: str, probe: str) -> None:
    """Dry run: what would be patched for PROBE, and with what; nothing is changed."""
    from ptwprobe.listing import dry_run

    one_of(pid, file)
    refused = False
    for text, ok in dry_run(pid, file, probe, form):
        refused |= not ok
        click.echo(text)
    if refused:
        raise SystemExit(4)


# ---------------------------------------------------------------- recording


def ring_bits(size: str) -> int:
    """log2 of ``size`` ("512K", "16M", or bytes), rounded up to a power of two."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    text = size.upper().removesuffix("IB").removesuffix("B")
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1)
    if not number.isdecimal() or int(number) == 0:
        raise UsageError(f"-m {size}: not a size", "write it as 512K, 16M or 1G")
    return max(0, (int(number) * unit - 1).bit_length())


def processes_of(threads: tuple[int, ...]) -> list[int]:
    """The processes that ``threads`` belong to."""
    from ptwprobe.process import process_of_thread

    return list(dict.fromkeys(process_of_thread(t) for t in threads))


@cli.command()
@click.option("-p", "--pid", "pids", type=int, multiple=True, help="a running process; may be repeated")
@click.option("-t", "--tid", "tids", type=int, multiple=True, help="keep only this thread's hits; may be repeated")
@click.option("-e", "--event", "probes", multiple=True, metavar="PROBE", help="a probe; may be repeated")
@click.option("-o", "--output", default="ptwprobe.ptw", show_default=True, help="session folder")
@click.option("--channel", default="auto", show_default=True, help="how values leave the process: auto, ring")
@click.option("--flow", default="none", show_default=True, help="control flow to record: none")
@click.option("--duration", type=float, metavar="S", help="stop after S seconds")
@click.option("-m", "--ring-size", default="16M", show_default=True, help="ring for each CPU and process")
@click.option("--json", "as_json", is_flag=True, help="the result as one JSON object on stdout")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def record(
    pids: tuple[int, ...],
    tids: tuple[int, ...],
    probes: tuple[str, ...],
    output: str,
    channel: str,
    flow: str,
    duration: float | None,
    ring_size: str,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Record probes in running processes, or in a command given after `--`.

    Ends after the duration, at Ctrl-C, or when the processes end.
    """
    from ptwprobe.probe.spec import parse
    from ptwprobe.record.session import End, Session

    with closing_line() as keep:
        check_flow(flow)
        if duration is not None and not 0 < duration < math.inf:
            raise UsageError(f"--duration {duration}: not a time", "give seconds, such as --duration 5")
        parsed = [parse(probe) for probe in probes]
        session = Session(
            pid=list(pids) or (processes_of(tids) if tids and not command else None),
            command=list(command) or None,
            output=output,
            channel=channel,
            threads=list(tids) or None,
            ring_bits=ring_bits(ring_size),
            on_note=say,
        )
        try:
            with stop_signals(lambda: session.request_stop(End.INTERRUPT)), session:
                for probe in parsed:
                    session.add(probe)
                session.start()
                say(f"recording into {output} through channel {session.choice.name}: {session.choice.reason}")
                session.wait(duration)
        finally:
            keep(session.totals)
        end = session.end.value if session.end else ""
        status = "" if session.exit_status is None else f"; the command's exit status is {session.exit_status}"
        say(f"{output}: ended by {end}{status}")
        if as_json:
            click.echo(json.dumps(session.summary()))
        if session.end in (End.DISK_FULL, End.WRITE_ERROR):
            raise SystemExit(EXIT_TRACE_ERRORS)


def check_flow(flow: str) -> None:
    """Control flow is not in this version."""
    from ptwprobe.errors import UnsupportedError

    if flow in ("pt", "step"):
        raise UnsupportedError(f"--flow {flow} is not in this version of ptwprobe", "leave --flow out")
    if flow != "none":
        raise UsageError(f"--flow {flow}: not known", "the design has none, pt and step")


@contextmanager
def stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP call ``stop`` instead of ending the process half-way through a change."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.getsignal(s) for s in signals}

    def handler(number: int, frame: object) -> None:
        stop()

    for s in signals:
        if not (s == signal.SIGHUP and before[s] == signal.SIG_IGN):
            signal.signal(s, handler)
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, old)


# ---------------------------------------------------------------- restoring


@cli.command()
@click.option("-p", "--pid", type=int, help="only this process")
@click.option("--json", "as_json", is_flag=True, help="one JSON object instead of text")
def status(pid: int | None, as_json: bool) -> None:
    """Processes that have something of ptwprobe in them: recorded now, left over, or inherited by fork."""
    from ptwprobe.patch import recover
    from ptwprobe.report import status as reporter

    found = recover.status(pid)
    if as_json:
        click.echo(json.dumps(reporter.as_json(found)))
        return
    for one in found:
        for line in reporter.as_text(one):
            click.echo(line)
    if not found:
        say(f"nothing of ptwprobe in process {pid}" if pid else "nothing of ptwprobe in any process")


@cli.command()
@click.option("-p", "--pid", type=int, required=True, help="the process")
@click.option("--all", "with_children", is_flag=True, help="the processes that were forked from it meanwhile, too")
def detach(pid: int, with_children: bool) -> None:
    """Take out of a process what a ptwprobe that is gone has left in it."""
    from ptwprobe.patch import recover
    from ptwprobe.report import status as reporter

    code = EXIT_OK
    for outcome in recover.detach(pid, with_children):
        if isinstance(outcome, PtwprobeError):
            show_error(outcome)
            code = max(code, outcome.exit_code)
            continue
        for line in reporter.restored(outcome):
            click.echo(line)
        if outcome.left:
            code = max(code, EXIT_TARGET)
    if code:
        raise SystemExit(code)


# ---------------------------------------------------------------- reading


@cli.command()
@click.argument("trace", type=click.Path())
@click.option("--format", "format_", type=click.Choice(["text", "jsonl", "csv"]), default="text", show_default=True)
@click.option("--event", "events", multiple=True, help="only this event (grp/name or a glob); may be repeated")
@click.option("--tid", "tids", type=int, multiple=True, help="only this thread; may be repeated")
@click.option(
    "--time", "time_", metavar="A,B", help="only times from A to B: ns, or seconds with a dot; either may be left out"
)
@click.option("--flow", is_flag=True, help="branches too, with the hits among them")
@click.option(
    "--only",
    "--itrace",
    metavar="WHAT",
    help="with control flow, of hits, branches, calls, returns, jumps, syscalls, interrupts, trace, events, errors only"
    " these (commas between), or letters as of perf's --itrace",
)
@click.option("--indent", is_flag=True, help="with control flow, by the depth of calls")
@click.option("--stack", is_flag=True, help="the calls that led to each hit, as control flow tells them")
@click.option("--root", type=click.Path(), help="put in front of the paths of recorded programs")
@click.option(
    "--cache", "caches", type=click.Path(), multiple=True, help="a folder of files by build id; may be repeated"
)
@click.option("--live", is_flag=True, help="ask processes that still run for their files")
@click.option("-j", "--jobs", type=click.IntRange(min=0), default=0, help="threads that decode; all CPUs by default")
def script(
    trace: str,
    format_: str,
    events: tuple[str, ...],
    tids: tuple[int, ...],
    time_: str | None,
    flow: bool,
    only: str | None,
    indent: bool,
    stack: bool,
    root: str | None,
    caches: tuple[str, ...],
    live: bool,
    jobs: int,
) -> None:
    """Print what a session recorded, one line for each hit, branch or loss."""
    from ptwprobe.report import script as reporter
    from ptwprobe.trace.open import open as open_trace

    with closing_line() as keep:
        sys.stdout.flush()
        opened = open_trace(trace, root=root, caches=caches, live=live, jobs=jobs)
        view = reporter.FlowView(only, indent, stack) if flow or only or indent or stack else None
        filters = (list(events), list(tids), time_)
        totals = reporter.write(opened, sys.stdout.fileno(), format_, *filters, view, say)
        keep(totals)
        if totals.errors:
            raise SystemExit(EXIT_TRACE_ERRORS)


@cli.command()
@click.argument("trace", type=click.Path())
def dump(trace: str) -> None:
    """Print the Intel PT packets of a session, with their offsets."""
    from ptwprobe.report import dump as reporter
    from ptwprobe.trace.open import open as open_trace

    sys.stdout.flush()
    if reporter.write(open_trace(trace), sys.stdout.fileno()):
        raise SystemExit(EXIT_TRACE_ERRORS)


@cli.command()
@click.option("--seconds", type=float, default=5.0, show_default=True, help="how long to record")
@click.option("-o", "--output", type=click.Path(), help="keep the session in this folder")
def demo(seconds: float, output: str | None) -> None:
    """Instrument a real running program, show its hits as they come, and a histogram."""
    from ptwprobe.demo import run

    with closing_line() as keep:
        keep(run(seconds, Path(output) if output else None, click.echo))


def main() -> Any:
    """Entry point: runs the verb, shows any error once, returns the exit code by exiting."""
    try:
        cli.main(standalone_mode=False)
    except PtwprobeError as error:
        show_error(error)
        sys.exit(error.exit_code)
    except plain_click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except plain_click.ClickException as error:
        error.show()
        if len(sys.argv) > 1 and sys.argv[1] in CLOSED_BY_TOTALS:
            click.echo(str(Totals()), err=True)
        sys.exit(EXIT_USAGE)
    except plain_click.exceptions.Abort:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_OK)
    sys.exit(EXIT_OK)


if __name__ == "__main__":
    main()
