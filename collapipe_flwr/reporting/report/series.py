"""Numbers by round, thinned to what a screen can show."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from math import isnan, nan
from statistics import fmean

MOST_COLUMNS = 100  # of a chart of bars
MOST_POINTS = 400  # of a curve: about one for every two pixels


class Series:
    """One number per round; NaN where there is none."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = array("d")

    def put(self, place: int, value: float | None) -> None:
        """Set the number of the ``place``-th round; skipped rounds have none."""
        values = self.values
        if place >= len(values):
            values.extend([nan] * (place - len(values)))
            values.append(nan if value is None else value)
        else:
            values[place] = nan if value is None else value

    def pad(self, count: int) -> list[float]:
        """Return the numbers of ``count`` rounds; those after the last known are NaN."""
        return [*self.values, *[nan] * (count - len(self.values))]

    @property
    def known(self) -> list[float]:
        """The numbers of the rounds that have one."""
        return [value for value in self.values if not isnan(value)]

    @property
    def mean(self) -> float | None:
        known = self.known
        return fmean(known) if known else None

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if not isnan(value)), None)


def thin(
    rounds: Sequence[int],
    values: Sequence[float],
    most: int = MOST_POINTS,
    of: Callable[[Iterable[float]], float] = fmean,
) -> tuple[list[int], list[float | None]]:
    """Reduce to at most ``most`` points: ``of`` neighbouring rounds, placed at their last."""
    stride = stride_of(len(rounds), most)
    x, y = [], []
    for start in range(0, len(rounds), stride):
        group = [value for value in values[start : start + stride] if not isnan(value)]
        x.append(rounds[min(start + stride, len(rounds)) - 1])
        y.append(of(group) if group else None)
    return x, y


def stride_of(count: int, most: int = MOST_POINTS) -> int:
    """Return the rounds per point of a thinned curve."""
    return max(1, -(-count // most))
