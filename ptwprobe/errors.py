"""The one exception tree: what went wrong, what to do about it, and the exit code that says so.

Caught once, in ``cli.main``; everything that can go wrong for a user is a subclass of :class:`PtwprobeError`.
"""

from __future__ import annotations

import enum

EXIT_OK = 0
EXIT_TRACE_ERRORS = 1
EXIT_USAGE = 2
EXIT_UNSUPPORTED = 3
EXIT_TARGET = 4


class RefusalReason(enum.Enum):
    """Why a site is not patched. The value is the name that every output prints."""

    FOREIGN_PROBE = "foreign-probe"
    """The bytes in memory are not the file's: somebody else's breakpoint or jump."""
    ALREADY_PROBED = "already-probed"
    """A probe of this session has the site, or a window that overlaps it."""
    JUMP_TARGET_IN_WINDOW = "jump-target-in-window"
    """Something jumps into the bytes that the patch would overwrite, and no tactic avoids that."""
    UNKNOWN_TARGETS = "unknown-targets"
    """The function has an indirect jump whose targets are not known, so the window cannot be proven free."""
    CALL_IN_WINDOW = "call-in-window"
    SYSCALL_IN_WINDOW = "syscall-in-window"
    CROSSES_PAGE = "crosses-page"
    """The patched bytes would lie in two pages that have to be written in place, so the write could tear."""
    NOT_RELOCATABLE = "not-relocatable"
    """A displaced instruction cannot be re-encoded elsewhere (far, privileged, loop, xbegin ...)."""
    NOT_AN_INSTRUCTION = "not-an-instruction"
    """The site is not an instruction boundary, or its bytes do not decode."""
    FUNCTION_TOO_SHORT = "function-too-short"
    """The window would run past the end of the function and punning does not fit."""
    NO_STUB_SPACE = "no-stub-space"
    """No free address range within reach of the jump."""
    NOT_EXECUTABLE = "not-executable"
    """The site is not in an executable, file-backed mapping of the target."""
    ARGUMENTS_NEED_ENTRY = "arguments-need-entry"
    """``$argN`` is meaningful at a function's entry only."""
    IDENTITY_CHANGED = "identity-changed"
    """The file on disk is not the one that is mapped (build id or inode differ)."""
    MAY_FAULT = "may-fault"
    """A displaced instruction can fault, and the program would go by the address; nobody traces it to correct that."""
    SMALL_STACK = "small-stack"
    """The code runs on stacks that have no room for what the stub needs (goroutines)."""
    SECCOMP = "seccomp"
    """The target filters system calls and the filter cannot be suspended from here."""
    TSC_DISABLED = "tsc-disabled"
    """The target may not read the time stamp counter (prctl PR_SET_TSC), which every stub does."""
    BUSY = "busy"
    """A task that shares the memory did not stop in time, or a thread stayed inside the window."""


class PtwprobeError(Exception):
    """Base of all errors shown to a user: ``message`` names the thing and the place, ``hint`` the remedy."""

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(PtwprobeError):
    """The call's words are off."""


class ProbeSyntaxError(UsageError):
    """A probe does not parse. ``column`` is the 0-based offset in ``text`` where it goes wrong."""

    def __init__(self, text: str, column: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.text = text
        self.column = column

    def __str__(self) -> str:
        return f"{self.message}\n  {self.text}\n  {' ' * self.column}^"


class InputError(PtwprobeError):
    """A file (ELF, trace, session) is not what it should be."""


class OutputError(PtwprobeError):
    """What was to be printed could not be written (a full disk, say)."""


class ResolveError(PtwprobeError):
    """A probe's WHERE names nothing, or more than one thing."""


class NotYetError(ResolveError):
    """WHERE names something that the process does not have, but may still get (an object, an IFUNC's binding)."""


class UnsupportedError(PtwprobeError):
    """This machine, kernel or CPU cannot do it."""

    exit_code = EXIT_UNSUPPORTED


class PermissionDeniedError(UnsupportedError):
    """The user may not do it."""


class StubError(UnsupportedError):
    """A stub cannot be assembled, or did not come out as meant. Nothing was changed."""


class TargetError(PtwprobeError):
    """The target was in the way."""

    exit_code = EXIT_TARGET


class TargetGoneError(TargetError):
    """The target is not there (any more)."""


class RefusedError(TargetError):
    """A site is not patched, for an enumerated reason. Nothing was changed."""

    def __init__(self, reason: RefusalReason, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.reason = reason

    def __str__(self) -> str:
        return f"refused ({self.reason.value}): {self.message}"
