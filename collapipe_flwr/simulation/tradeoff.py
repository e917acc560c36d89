"""The V trade-off: latency bought with longer energy queues, as the penalty weight grows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.simulate import Tick, silent, simulate
from collapipe_flwr.simulation.summary import OURS, summarise

FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeoffPoint:
    """DSSDA with one penalty weight in the world of the first seed."""

    penalty_weight: float
    latency_mean_s: float
    queue_share_max: float
    energy_over_budget: float


def penalty_sweep(setting: Setting, tick: Tick = silent) -> tuple[TradeoffPoint, ...]:
    """One episode per factor on the setting's own penalty weight."""
    return tuple(_point(setting, factor, tick) for factor in FACTORS)


def _point(setting: Setting, factor: float, tick: Tick) -> TradeoffPoint:
    weight = factor * setting.settings.penalty_weight
    settings = replace(setting.settings, penalty_weight=weight)
    one = replace(setting, policies=(OURS,), seeds=setting.seeds[:1], settings=settings)
    result = simulate(one, tick).policies[0]
    return TradeoffPoint(
        penalty_weight=weight,
        latency_mean_s=summarise(result).latency_mean_s,
        queue_share_max=max(result.scores[0].queue_share),
        energy_over_budget=result.scores[0].energy_over_budget,
    )
