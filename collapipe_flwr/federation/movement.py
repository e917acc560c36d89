"""How far the model moved in a round: what the scheduler's smoothness and drift estimates need.

With x the global update and x_m that of cluster m: |x|, |x - previous x|, and the
example-weighted mean of |x_m - x|^2. Works key by key, so that memory stays at one model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from collapipe_flwr.federation.arrays import averaging_view


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Whole models around one aggregation; ``clusters`` pairs each with its examples."""

    before: ArrayRecord
    after: ArrayRecord
    clusters: tuple[tuple[ArrayRecord, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Norms over all averaged arrays; ``change_norm`` is None in the first round."""

    norm: float
    change_norm: float | None
    spread: float


class MovementMeter:
    """Measures successive rounds; ``last`` is the update of the round before."""

    def __init__(self) -> None:
        self.last: dict[str, NDArray[np.floating]] = {}

    def measure(self, models: Models) -> Movement:
        """The movement of this round."""
        before, after = averaging_view(models.before), averaging_view(models.after)
        moved = {k: after[k].numpy() - before[k].numpy() for k in before if k in after}
        change = None
        if self.last.keys() == moved.keys():
            change = math.sqrt(sum(_square(x - self.last[k]) for k, x in moved.items()))
        self.last = moved
        return Movement(
            norm=math.sqrt(sum(_square(x) for x in moved.values())),
            change_norm=change,
            spread=_spread({k: after[k].numpy() for k in moved}, models),
        )


def _spread(after: Mapping[str, NDArray[np.floating]], models: Models) -> float:
    total = math.fsum(examples for _, examples in models.clusters)
    if total <= 0:
        return 0.0
    spread = 0.0
    for record, examples in models.clusters:
        view = averaging_view(record)
        distance = sum(_square(view[k].numpy() - mean) for k, mean in after.items() if k in view)
        spread += examples / total * distance
    return spread


def _square(x: NDArray[np.floating]) -> float:
    flat = x.ravel().astype(np.float64, copy=False)
    return float(flat @ flat)
