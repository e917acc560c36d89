"""How far the global model moves in each round, for what schedulers learn of convergence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.outcome import Movement
from collapipe_flwr.federation.arrays import averaging_view
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.round import ClosedRound


class MovementMeter:
    """How far the model moved in successive rounds; a resumed run knows its ``last`` update.

    With x the global update and x_m that of cluster m: |x|, |x - previous x|, and the
    example-weighted mean of |x_m - x|^2. Works key by key, so memory stays at one model.
    """

    def __init__(self) -> None:
        self.last: dict[str, NDArray[np.floating]] = {}

    def dump(self) -> ComponentState:
        return ComponentState(arrays=self.last)

    def load(self, memory: ComponentState) -> None:
        self.last = dict(memory.arrays)

    def measure(self, closed: ClosedRound) -> Movement:
        """Measure a round; nothing is known of one that the inner strategy dropped."""
        if closed.after is None:
            return Movement()
        before, after = averaging_view(closed.before), averaging_view(closed.after)
        moved = {}
        for key in (key for key in before if key in after):
            start = before[key].numpy()
            if np.isfinite(start).all():  # a mask may hold -inf
                moved[key] = after[key].numpy() - start
        change = None
        if self.last.keys() == moved.keys():
            change = math.sqrt(sum(_square(x - self.last[k]) for k, x in moved.items()))
        rotates = closed.products is not None and not closed.products.whole
        self.last = {} if rotates else moved  # of bases that no other round has
        return Movement(
            norm=math.sqrt(sum(_square(x) for x in moved.values())),
            change_norm=change,
            spread=_spread({k: after[k].numpy() for k in moved}, closed),
        )


def _spread(after: Mapping[str, NDArray[np.floating]], closed: ClosedRound) -> float:
    total = math.fsum(closed.examples[name] for name in closed.models)
    if total <= 0:
        return 0.0
    spread = 0.0
    for name, record in closed.models.items():
        view = averaging_view(record)
        distance = sum(_square(view[k].numpy() - mean) for k, mean in after.items() if k in view)
        spread += closed.examples[name] / total * distance
    return spread


def _square(x: NDArray[np.floating]) -> float:
    flat = x.ravel().astype(np.float64, copy=False)
    return float(flat @ flat)
