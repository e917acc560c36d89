"""Whether something grows: the slope of its last half by least squares, and what is allowed.

Fitted is the least of every minute, which what a round needs for a while does not move, and what
is never given back does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression

MINUTE_S, HOUR_S = 60.0, 3600.0
# Per hour, of every process that lived through the last half. Fixed before the first soak.
PROCESS_BOUNDS: Mapping[str, float] = {
    "memory_bytes": 16e6,  # ends 1 GB of free memory after 2.5 days without a restart
    "descriptors": 4.0,  # of 1024
    "threads": 4.0,
}
# The same of places on disk.
DISK_BOUNDS: Mapping[str, float] = {
    "states of control units": 1e6,
    "devices' caches": 1e6,
    "temporary files": 1e6,
    "run directory": 16e6,  # a line of events per round
    "Flower's home": 4e6,
    "Flower's database": 64e6,
    "logs": 64e6,  # which journald rotates
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Of one quantity of one process or place."""

    of: str
    what: str
    first: float
    last: float
    per_hour: float
    bound: float

    @property
    def is_bounded(self) -> bool:
        """Whether it grows no faster than is allowed."""
        return self.per_hour <= self.bound


def growth(
    of: str, what: str, series: Sequence[tuple[float, float]], since_s: float, bound: float
) -> Growth:
    """Of a series of (seconds, value), fitted to what lies at or after ``since_s``."""
    minutes: dict[int, float] = {}
    for at_s, value in series:
        if at_s >= since_s:
            number = int(at_s // MINUTE_S)
            minutes[number] = min(value, minutes.get(number, value))
    times, values = [number * MINUTE_S for number in minutes], list(minutes.values())
    slope = linear_regression(times, values).slope if len(times) > 1 else 0.0
    return Growth(
        of=of,
        what=what,
        first=values[0],
        last=values[-1],
        per_hour=slope * HOUR_S,
        bound=bound,
    )
