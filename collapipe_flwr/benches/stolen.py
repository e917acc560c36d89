"""Processor time that the host of a virtual machine gives to others: turns without it say more."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

QUIET = 0.02  # of the processors' time
_COUNTERS, _STOLEN_COLUMN = Path("/proc/stat"), 8


class Stolen:
    """The share of the processors' time that was taken away, from one look to the next."""

    def __init__(self) -> None:
        self._seen = (time.monotonic(), _stolen_s())

    def share(self) -> float:
        """Since the last look; 0 on systems that do not count it."""
        then, self._seen = self._seen, (time.monotonic(), _stolen_s())
        wall_s = max(self._seen[0] - then[0], 1e-9)
        return (self._seen[1] - then[1]) / (wall_s * (os.cpu_count() or 1))


def quietest(shares: Sequence[float], count: int) -> list[int]:
    """The ``count`` turns of which least was stolen, in their order."""
    return sorted(sorted(range(len(shares)), key=lambda turn: shares[turn])[:count])


def _stolen_s() -> float:
    """Of all processors, since the machine started."""
    try:
        counted = _COUNTERS.read_text().split(maxsplit=_STOLEN_COLUMN + 1)[_STOLEN_COLUMN]
    except (OSError, IndexError):
        return 0.0
    return int(counted) / os.sysconf("SC_CLK_TCK")
