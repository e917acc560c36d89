"""Seconds of a core that programs took, which a machine that does much else does not change."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path


def cpu_s(setting: str) -> float:
    """What processes whose environment has a setting that begins so have used, and all ended ones.

    The latter are the children of this process, and theirs.
    """
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if setting.encode() in (process / "environ").read_bytes():
                fields = (process / "stat").read_text().rpartition(") ")[2].split()
                ticks += sum(map(int, fields[11:15]))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ticks / os.sysconf("SC_CLK_TCK") + ended.ru_utime + ended.ru_stime


def is_busy() -> bool:
    """Whether this machine does something else, too, so that clocks on the wall tell little."""
    return os.getloadavg()[0] > 1.0
