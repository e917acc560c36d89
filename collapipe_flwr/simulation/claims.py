"""DSSDA held against every other policy, and against the claims of the paper's abstract.

A policy that breaks an energy budget in some seed does not count as the best pipeline. Every claim
also states what is possible: the value of a plan as good as the bound of docs/theory.md, section
10. Where that is less than a claim needs, no scheduler can keep it in this setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from operator import ge, le, lt

from collapipe_flwr.simulation.bounds import Bounds
from collapipe_flwr.simulation.simulate import OURS, Simulation
from collapipe_flwr.simulation.summary import (
    Json,
    Summary,
    bound_summary,
    bounds_json,
    policies_json,
    quartiles,
    summaries,
)

PAPER_BASELINES = ("fedavg", "splitfed", "uniform")
PIPELINE_BASELINES = ("splitfed", "uniform", "memory", "throughput", "random")
LATENCY_LOWER_PERCENT = 48.98  # the abstract of arXiv 2509.19855
EFFICIENCY_HIGHER_PERCENT = 15.09
MEMORY_SHARE = 0.5


def simulation_json(simulation: Simulation) -> Json:
    """The whole simulation as plain data."""
    return {
        "setting": simulation.setting.as_json(),
        "policies": policies_json(simulation),
        "bounds": bounds_json(simulation),
        "comparison": comparison(simulation),
    }


def comparison(simulation: Simulation) -> Json | None:
    """DSSDA against each other policy, and the paper's three claims; None without DSSDA."""
    by_name = {row.policy: row for row in summaries(simulation)}
    ours = by_name.pop(OURS, None)
    if ours is None or not by_name:
        return None
    bound = bound_summary(simulation)
    against = {name: _against(ours, row) for name, row in by_name.items()}
    memory_share = against["fedavg"]["peak_memory_share"] if "fedavg" in against else None
    return {
        "against": against,
        "claims": {
            "latency_lower_percent": _latency_claim(simulation, ours, by_name, bound),
            "efficiency_higher_percent": _efficiency_claim(simulation, ours, by_name, bound),
            "peak_memory_share": _claim(memory_share, lt, MEMORY_SHARE),
            "energy_over_budget_max": _claim(ours.energy_over_budget_max, le, 1.0),
        },
    }


def _against(ours: Summary, other: Summary) -> dict[str, float | None]:
    return {
        "latency_lower_percent": _lower(ours.latency_s["mean"], other.latency_s["mean"]),
        "latency_p95_lower_percent": _lower(ours.latency_s["p95"], other.latency_s["p95"]),
        "time_to_target_lower_percent": _lower(ours.time_to_target_s, other.time_to_target_s),
        "efficiency_higher_percent": _higher(ours.compute_efficiency, other.compute_efficiency),
        "peak_memory_share": ours.peak_device_memory_bytes / other.peak_device_memory_bytes,
    }


def _latency_claim(
    simulation: Simulation, ours: Summary, others: Mapping[str, Summary], bound: Bounds
) -> Json:
    """Against the quickest of the paper's three baselines, whether it keeps budgets or not."""
    rivals = [others[name] for name in PAPER_BASELINES if name in others]
    best = min(rivals, key=lambda row: row.latency_s["mean"], default=None)
    if best is None:
        return _claim(None, ge, LATENCY_LOWER_PERCENT)
    scores = [_scores(simulation, row.policy, "latency_mean_s") for row in rivals]
    fastest = [min(each) for each in zip(*scores, strict=True)]
    mine = _scores(simulation, OURS, "latency_mean_s")
    seeds = [100.0 * (1.0 - a / b) for a, b in zip(mine, fastest, strict=True)]
    return _claim(
        _lower(ours.latency_s["mean"], best.latency_s["mean"]),
        ge,
        LATENCY_LOWER_PERCENT,
        rival=best.policy,
        possible=_lower(bound.latency_in_budget_s, best.latency_s["mean"]),
        seeds=seeds,
    )


def _efficiency_claim(
    simulation: Simulation, ours: Summary, others: Mapping[str, Summary], bound: Bounds
) -> Json:
    """Against the best of the pipelines that keep all energy budgets."""
    rivals = [others[n] for n in PIPELINE_BASELINES if n in others and others[n].keeps_budgets]
    best = max(rivals, key=lambda row: row.compute_efficiency, default=None)
    if best is None:
        return _claim(None, ge, EFFICIENCY_HIGHER_PERCENT)
    pairs = zip(
        _scores(simulation, OURS, "compute_efficiency"),
        _scores(simulation, best.policy, "compute_efficiency"),
        strict=True,
    )
    return _claim(
        _higher(ours.compute_efficiency, best.compute_efficiency),
        ge,
        EFFICIENCY_HIGHER_PERCENT,
        rival=best.policy,
        possible=_higher(bound.compute_efficiency, best.compute_efficiency),
        seeds=[_higher(a, b) for a, b in pairs],
    )


def _claim(
    seen: float | None,
    holds: Callable[[float, float], bool],
    needed: float,
    *,
    rival: str | None = None,
    possible: float | None = None,
    seeds: Sequence[float] = (),
) -> Json:
    kept = None if seen is None else holds(seen, needed)
    values: Json = {"seen": seen, "needed": needed, "kept": kept}
    if rival is not None:
        spread = {**quartiles(seeds), "worst": min(seeds)}
        values |= {"rival": rival, "possible": possible, "seeds": spread}
    return values


def _scores(simulation: Simulation, policy: str, field: str) -> list[float]:
    found = simulation.policy(policy)
    return [] if found is None else [float(getattr(score, field)) for score in found.scores]


def _lower(ours: float, other: float) -> float | None:
    return 100.0 * (1.0 - ours / other) if isfinite(ours) and isfinite(other) else None


def _higher(ours: float, other: float) -> float:
    return 100.0 * (ours / other - 1.0)
