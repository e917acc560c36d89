"""The market: what a second, a joule and a share of bandwidth cost each cluster right now.

Given the prices of the others' decisions, every cluster may be planned alone; ``scorer`` computes
that cluster-wise objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.costs.layouts import Layouts

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """Prices and the bandwidth split that a plan implies, one entry per cluster."""

    latency_price: float  # objective per second of the round, at rho = 1
    price_mi: Array  # objective per joule of each member
    ceiling_m: Array  # the round's latency as far as the other clusters cause it
    slack_price_m: Array  # objective per second that a cluster stays below the ceiling
    edge_hz_m: Array


def row_prices(price_mi: Array, rows: Layouts) -> Array:
    """Prices per joule of the control unit and of every slot, (R, S + 1)."""
    cluster = rows.cluster_r[:, None]
    slots = np.where(rows.used_rs, price_mi[cluster, np.maximum(rows.member_rs, 0)], 0.0)
    return np.concatenate([price_mi[rows.cluster_r, 0][:, None], slots], axis=1)


def segment_choice(values: Array, cluster_r: Ints, clusters: Ints) -> Ints:
    """Index of the best row of each of ``clusters``; ties go to the first."""
    order = np.lexsort((np.arange(len(values)), values, cluster_r))
    return np.asarray(order[np.searchsorted(cluster_r[order], clusters)], dtype=np.int64)
