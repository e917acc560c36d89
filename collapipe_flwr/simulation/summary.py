"""A simulation as plain data: averages over seeds, bounds, and DSSDA beside every other policy.

A policy that breaks an energy budget in some seed does not count as the best pipeline. Every claim
of the paper's abstract also states what is possible: the value of a plan as good as the bound of
docs/theory.md, section 10. Where that is less than a claim needs, no scheduler can keep it in this
setting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from operator import ge, le, lt

import numpy as np

from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.simulation.score import Bounds, Score
from collapipe_flwr.simulation.simulate import OURS, PolicyResult, Simulation

Json = dict[str, object]
PAPER_BASELINES = ("fedavg", "splitfed", "uniform")
PIPELINE_BASELINES = ("splitfed", "uniform", "memory", "throughput", "random")
LATENCY_LOWER_PERCENT = 48.98  # the abstract of arXiv 2509.19855
EFFICIENCY_HIGHER_PERCENT = 15.09
MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy averaged over seeds, except that energy is that of the worst seed."""

    policy: str
    latency_s: Mapping[str, float]  # mean, p95; q1, median and q3 of the seeds' means
    compute_efficiency: float
    busy_share: float
    peak_device_memory_bytes: int
    energy_over_budget_max: float
    time_to_target_s: float
    decision_s: Mapping[str, float]  # median
    fallbacks: int

    @property
    def keeps_budgets(self) -> bool:
        """Whether every device keeps its energy budget in every seed: only then it may win."""
        return self.energy_over_budget_max <= 1.0

    def as_json(self) -> Json:
        """Write the keys of ``policies.NAME``; ``capacity_used`` is another name of efficiency."""
        values: Json = to_plain(self) | {
            "time_to_target_s": _or_null(self.time_to_target_s),
            "capacity_used": self.compute_efficiency,
            "keeps_budgets": self.keeps_budgets,
        }
        del values["policy"]
        return values


def summarise(result: PolicyResult) -> Summary:
    """Average over seeds; percentiles are over all rounds, budgets against the worst seed."""
    scores = result.scores
    latency = np.concatenate([s.latency_s for s in scores])
    decision = np.concatenate([s.decision_s for s in scores])
    return Summary(
        policy=result.policy,
        latency_s={
            "mean": float(latency.mean()),
            "p95": float(np.percentile(latency, 95)),
            **quartiles([s.latency_mean_s for s in scores]),
        },
        compute_efficiency=_mean([s.compute_efficiency for s in scores]),
        busy_share=_mean([s.busy_share for s in scores]),
        peak_device_memory_bytes=round(_mean([s.peak_device_memory_bytes for s in scores])),
        energy_over_budget_max=max(s.energy_over_budget_max for s in scores),
        time_to_target_s=_mean([s.time_to_target_s for s in scores]),
        decision_s={"median": float(np.median(decision))},
        fallbacks=sum(s.fallbacks for s in scores),
    )


def summaries(simulation: Simulation) -> tuple[Summary, ...]:
    return tuple(summarise(p) for p in simulation.policies if p.refusal is None)


def average_bounds(simulation: Simulation) -> Bounds:
    """Average the bounds over the seeds of the simulation."""
    names = [field.name for field in fields(Bounds)]
    return Bounds(**{n: _mean([getattr(each, n) for each in simulation.bounds]) for n in names})


def quartiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, [25, 50, 75])
    return dict(zip(("q1", "median", "q3"), found.tolist(), strict=True))


def policies_json(simulation: Simulation) -> Json:
    """Write policies' averages and seeds; equal settings give equal values but for decision_s."""
    bound_s = average_bounds(simulation).latency_in_budget_s
    policies: Json = {}
    for result in simulation.policies:
        if result.refusal is not None:
            policies[result.policy] = {"refused": result.refusal}
            continue
        row = summarise(result)
        values = row.as_json() | {"latency_over_bound": row.latency_s["mean"] / bound_s}
        policies[result.policy] = {**values, "seeds": [_score_json(s) for s in result.scores]}
    return policies


def bounds_json(simulation: Simulation) -> Json:
    """Write the averages of bounds, and every seed's."""
    pairs = zip(simulation.setting.seeds, simulation.bounds, strict=True)
    seeds = [{"seed": seed, **to_plain(each)} for seed, each in pairs]
    return {**to_plain(average_bounds(simulation)), "seeds": seeds}


def _score_json(score: Score) -> Json:
    values: Json = to_plain(score) | {"time_to_target_s": _or_null(score.time_to_target_s)}
    return {key: v for key, v in values.items() if key not in ("decision_s", "fallbacks")}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_null(value: float) -> float | None:
    return value if isfinite(value) else None


def simulation_json(simulation: Simulation) -> Json:
    """Write the whole simulation as plain data."""
    return {
        "setting": simulation.setting.as_json(),
        "policies": policies_json(simulation),
        "bounds": bounds_json(simulation),
        "comparison": compare(simulation),
    }


def compare(simulation: Simulation) -> Json | None:
    """Compare DSSDA with each other policy and the paper's three claims; None without DSSDA."""
    by_name = {row.policy: row for row in summaries(simulation)}
    ours = by_name.pop(OURS, None)
    if ours is None or not by_name:
        return None
    bound = average_bounds(simulation)
    against = {name: _compare_two(ours, row) for name, row in by_name.items()}
    memory_share = against["fedavg"]["peak_memory_share"] if "fedavg" in against else None
    return {
        "against": against,
        "claims": {
            "latency_lower_percent": _claim_latency(simulation, ours, by_name, bound),
            "efficiency_higher_percent": _claim_efficiency(simulation, ours, by_name, bound),
            "peak_memory_share": _claim(memory_share, lt, MEMORY_SHARE),
            "energy_over_budget_max": _claim(ours.energy_over_budget_max, le, 1.0),
        },
    }


def _compare_two(ours: Summary, other: Summary) -> dict[str, float | None]:
    return {
        "latency_lower_percent": _lower(ours.latency_s["mean"], other.latency_s["mean"]),
        "latency_p95_lower_percent": _lower(ours.latency_s["p95"], other.latency_s["p95"]),
        "time_to_target_lower_percent": _lower(ours.time_to_target_s, other.time_to_target_s),
        "efficiency_higher_percent": _higher(ours.compute_efficiency, other.compute_efficiency),
        "peak_memory_share": ours.peak_device_memory_bytes / other.peak_device_memory_bytes,
    }


def _claim_latency(
    simulation: Simulation, ours: Summary, others: Mapping[str, Summary], bound: Bounds
) -> Json:
    """Compare with the quickest of the paper's three baselines, whether it keeps budgets or not."""
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


def _claim_efficiency(
    simulation: Simulation, ours: Summary, others: Mapping[str, Summary], bound: Bounds
) -> Json:
    """Compare with the best of the pipelines that keep all energy budgets."""
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
