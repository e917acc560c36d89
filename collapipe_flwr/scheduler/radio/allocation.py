"""Bandwidth and power of all clusters, jointly optimal for given layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.costs.chain import Chain, full_power_times
from collapipe_flwr.scheduler.radio.interior_point import TOLERANCE, InteriorPoint
from collapipe_flwr.scheduler.radio.problem import RadioProblem, radio_problem

Array = NDArray[np.float64]
ACCEPTED_GAP = 5e-4  # relative; worse solutions are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Radio decisions for one row per cluster, and what they say about prices."""

    edge_hz_r: Array
    times: Array  # (R, S + 1, 2) seconds per micro-batch, forward and backward
    latency_price_r: Array  # objective per second of each cluster's own latency
    steps: int  # Newton steps


def allocate(
    chain: Chain,
    price_rs: Array,
    *,
    latency_price: float,
    bandwidth_hz: float,
    tolerance: float = TOLERANCE,
) -> Allocation:
    """Minimise ``latency_price * max latency + sum price * energy``; raises ScheduleError.

    ``tolerance`` bounds the objective's relative distance from the optimum.
    """
    problem = radio_problem(chain, price_rs, latency_price=latency_price, bandwidth_hz=bandwidth_hz)
    _refuse_nonsense(problem)
    solver = InteriorPoint(problem)
    best = solver.solve(tolerance)
    if not best.gap < max(ACCEPTED_GAP, tolerance):
        raise ScheduleError(
            f"the radio solver stopped {best.gap:.1e} from the optimum after {best.steps} steps: "
            "check gains and payloads for extreme values"
        )
    every = np.zeros(problem.used_rh.size)
    every[solver.hops.flat_h] = np.exp(best.point.x)
    return Allocation(
        edge_hz_r=np.exp(best.point.omega),
        times=_split(every.reshape(problem.used_rh.shape)),
        latency_price_r=best.latency_price_r,
        steps=best.steps,
    )


def _refuse_nonsense(problem: RadioProblem) -> None:
    """Say which numbers no solver can use; raises ScheduleError."""
    given = {
        "prices": problem.price_rh,
        "the latency's price": np.array(problem.latency_price),
        "noise over gain": problem.noise_over_gain_rh[problem.used_rh],
        "bandwidth": np.array(problem.bandwidth_hz),
        "compute times": problem.fixed_s_r,
    }
    for name, values in given.items():
        if not np.isfinite(values).all():
            raise ScheduleError(
                f"the radio solver was given {name} that are not finite: check profiles"
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
