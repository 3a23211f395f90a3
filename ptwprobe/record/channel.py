"""Which way values leave the process: the choice of a channel, with its reason.

Responsible for the choice only; each channel's own code is in a file of its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import UnsupportedError, UsageError

CHANNELS = ("auto", "ring")
"""What ``--channel`` takes in this version."""

LATER_CHANNELS = ("pt", "pt-emulated", "tracefs", "uprobe")
"""Channels of the design that this version does not have."""

PMU_ROOT = Path("/sys/bus/event_source/devices")


@dataclass(frozen=True)
class ChannelChoice:
    """A channel that works here and why it was taken."""

    name: str
    reason: str


def choose(requested: str = "auto", pmu_root: Path = PMU_ROOT) -> ChannelChoice:
    """The channel for ``requested``.

    Raises UsageError for a name that no version knows, UnsupportedError for one that this version or machine lacks.
    """
    if requested in LATER_CHANNELS:
        raise UnsupportedError(
            f"channel '{requested}' is not in this version of ptwprobe",
            "use --channel ring (or auto), which works on any x86-64 machine",
        )
    if requested not in CHANNELS:
        known = ", ".join((*CHANNELS, *LATER_CHANNELS))
        raise UsageError(f"no channel is called '{requested}'", f"the channels are: {known}")
    features = _native.cpu_features()
    if not (features["rdpid"] or features["rdtscp"]):
        raise UnsupportedError(
            "channel 'ring' needs rdpid or rdtscp, and this CPU has neither", "run on a CPU of 2008 or later"
        )
    if requested == "ring":
        return ChannelChoice("ring", "asked for")
    if (pmu_root / "intel_pt").is_dir():
        return ChannelChoice("ring", "this version does not record Intel PT yet; the ring works on any x86-64 machine")
    return ChannelChoice("ring", "this machine has no intel_pt PMU; the ring works on any x86-64 machine")
