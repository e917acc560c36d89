"""A simulation as plain data: averages over seeds, and DSSDA held against every other policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import ge, le, lt

import numpy as np

from collapipe_flwr.core.json_codec import plain
from collapipe_flwr.simulation.score import Score
from collapipe_flwr.simulation.simulate import OURS, PolicyResult, Simulation

PAPER_BASELINES = ("fedavg", "splitfed", "uniform")
PIPELINE_BASELINES = ("splitfed", "uniform", "memory", "throughput", "random")
LATENCY_LOWER_PERCENT = 48.98  # the abstract of arXiv 2509.19855
EFFICIENCY_HIGHER_PERCENT = 15.09
MEMORY_SHARE = 0.5

Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy averaged over seeds, except that energy is that of the worst seed."""

    policy: str
    latency_s: Mapping[str, float]  # mean, p95
    compute_efficiency: float
    capacity_used: float
    peak_device_memory_bytes: int
    energy_over_budget_max: float
    time_to_target_s: float
    decision_s: Mapping[str, float]  # median
    fallbacks: int

    def as_json(self) -> Json:
        """The keys of ``policies.NAME``."""
        values: Json = plain(self) | {"time_to_target_s": _or_null(self.time_to_target_s)}
        del values["policy"]
        return values


def summarise(result: PolicyResult) -> Summary:
    """Averages over seeds; percentiles over all rounds; the worst seed against budgets."""
    scores = result.scores
    latency = np.concatenate([s.latency_s for s in scores])
    decision = np.concatenate([s.decision_s for s in scores])
    return Summary(
        policy=result.policy,
        latency_s={"mean": float(latency.mean()), "p95": float(np.percentile(latency, 95))},
        compute_efficiency=_mean([s.compute_efficiency for s in scores]),
        capacity_used=_mean([s.capacity_used for s in scores]),
        peak_device_memory_bytes=round(_mean([s.peak_device_memory_bytes for s in scores])),
        energy_over_budget_max=max(s.energy_over_budget for s in scores),
        time_to_target_s=_mean([s.time_to_target_s for s in scores]),
        decision_s={"median": float(np.median(decision))},
        fallbacks=sum(s.fallbacks for s in scores),
    )


def summaries(simulation: Simulation) -> tuple[Summary, ...]:
    """Every policy that ran."""
    return tuple(summarise(p) for p in simulation.policies if p.refusal is None)


def simulation_json(simulation: Simulation) -> Json:
    """The whole simulation; equal settings give equal values apart from ``decision_s``."""
    policies: dict[str, Json] = {}
    for result in simulation.policies:
        if result.refusal is not None:
            policies[result.policy] = {"refused": result.refusal}
            continue
        seeds = [_score_json(s) for s in result.scores]
        policies[result.policy] = {**summarise(result).as_json(), "seeds": seeds}
    return {
        "setting": simulation.setting.as_json(),
        "policies": policies,
        "comparison": comparison(summaries(simulation)),
    }


def _score_json(score: Score) -> Json:
    return {
        "seed": score.seed,
        "latency_s": list(score.latency_s),
        "queue_share": list(score.queue_share),
        "compute_efficiency": score.compute_efficiency,
        "peak_device_memory_bytes": score.peak_device_memory_bytes,
        "energy_over_budget_max": score.energy_over_budget,
        "time_to_target_s": _or_null(score.time_to_target_s),
        "last_plan": plain(score.last_plan),
    }


def comparison(rows: tuple[Summary, ...]) -> Json | None:
    """DSSDA against each other policy, and the paper's three claims; None without DSSDA."""
    by_name = {row.policy: row for row in rows}
    ours = by_name.pop(OURS, None)
    if ours is None or not by_name:
        return None
    return {
        "against": {name: _against(ours, row) for name, row in by_name.items()},
        "claims": _claims(ours, by_name),
    }


def _against(ours: Summary, other: Summary) -> Json:
    return {
        "latency_lower_percent": _lower(ours.latency_s["mean"], other.latency_s["mean"]),
        "latency_p95_lower_percent": _lower(ours.latency_s["p95"], other.latency_s["p95"]),
        "time_to_target_lower_percent": _lower(ours.time_to_target_s, other.time_to_target_s),
        "efficiency_higher_percent": _higher(ours, other),
        "peak_memory_share": _memory_share(ours, other),
    }


def _claims(ours: Summary, others: dict[str, Summary]) -> Json:
    """Each claim with its threshold and what came out; None where its baselines did not run."""
    latency = [
        _lower(ours.latency_s["mean"], others[n].latency_s["mean"])
        for n in PAPER_BASELINES
        if n in others
    ]
    efficiency = [_higher(ours, others[n]) for n in PIPELINE_BASELINES if n in others]
    whole = others.get("fedavg")
    memory = None if whole is None else _memory_share(ours, whole)
    return {
        "latency_lower_percent": _claim(
            min((v for v in latency if v is not None), default=None), ge, LATENCY_LOWER_PERCENT
        ),
        "efficiency_higher_percent": _claim(
            min(efficiency, default=None), ge, EFFICIENCY_HIGHER_PERCENT
        ),
        "peak_memory_share": _claim(memory, lt, MEMORY_SHARE),
        "energy_over_budget_max": _claim(ours.energy_over_budget_max, le, 1.0),
    }


def _claim(seen: float | None, holds: Callable[[float, float], bool], needed: float) -> Json:
    return {"seen": seen, "needed": needed, "kept": None if seen is None else holds(seen, needed)}


def _lower(ours: float, other: float) -> float | None:
    return 100.0 * (1.0 - ours / other) if isfinite(ours) and isfinite(other) else None


def _higher(ours: Summary, other: Summary) -> float:
    return 100.0 * (ours.compute_efficiency / other.compute_efficiency - 1.0)


def _memory_share(ours: Summary, other: Summary) -> float:
    return ours.peak_device_memory_bytes / other.peak_device_memory_bytes


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_null(value: float) -> float | None:
    return value if isfinite(value) else None
