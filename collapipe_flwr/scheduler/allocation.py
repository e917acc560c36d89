"""Bandwidth and power of all clusters, jointly optimal for given layouts.

``allocate`` is the default, vectorised solver; ``collapipe_flwr.scheduler.reference`` states the
same problem in cvxpy for tests and benches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.chain import Chain, full_power_times
from collapipe_flwr.scheduler.interior_point import InteriorPoint
from collapipe_flwr.scheduler.radio_problem import radio_problem

Array = NDArray[np.float64]

ACCEPTED_GAP = 1e-4  # relative; worse solutions are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Radio decisions for one row per cluster, and what they say about prices."""

    edge_hz_r: Array
    times: Array  # (R, S + 1, 2) seconds per micro-batch, forward and backward
    latency_price_r: Array  # objective per second of each cluster's own latency
    steps: int  # Newton steps


def allocate(
    chain: Chain, price_rs: Array, *, latency_price: float, bandwidth_hz: float
) -> Allocation:
    """Minimise ``latency_price * max latency + sum price * energy``; raises ScheduleError."""
    problem = radio_problem(chain, price_rs, latency_price=latency_price, bandwidth_hz=bandwidth_hz)
    best = InteriorPoint(problem).solve()
    point = best.point
    if not (np.isfinite(point.tau) and best.gap < ACCEPTED_GAP):
        raise ScheduleError(
            f"the radio solver stopped {best.gap:.1e} from the optimum after {best.steps} steps: "
            "check gains and payloads for extreme values"
        )
    width = np.exp(point.omega) * (bandwidth_hz / np.exp(point.omega).sum())
    fastest = full_power_times(chain, width)
    times = np.maximum(_split(np.where(problem.used_rh, np.exp(point.x), 0.0)), fastest)
    times[:, :, 1] = np.where(chain.hops.to_edge, fastest[:, :, 1], times[:, :, 1])
    return Allocation(
        edge_hz_r=width,
        times=times,
        latency_price_r=best.latency_price_r / np.exp(point.tau),
        steps=best.steps,
    )


def equal_shares(chain: Chain, bandwidth_hz: float) -> Allocation:
    """The plain alternative: equal bandwidth, full power."""
    count = len(chain.rows)
    width = np.full(count, bandwidth_hz / count)
    return Allocation(
        edge_hz_r=width,
        times=full_power_times(chain, width),
        latency_price_r=np.zeros(count),
        steps=0,
    )


def _split(values_rh: Array) -> Array:
    half = values_rh.shape[1] // 2
    return np.stack([values_rh[:, :half], values_rh[:, half:]], axis=2)
