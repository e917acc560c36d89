"""A simulation as plain data: averages over seeds, and how far they are from any plan's bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite

import numpy as np

from collapipe_flwr.core.json_codec import plain
from collapipe_flwr.simulation.bounds import Bounds
from collapipe_flwr.simulation.score import Score
from collapipe_flwr.simulation.simulate import PolicyResult, Simulation

Json = dict[str, object]


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
        """The keys of ``policies.NAME``; ``capacity_used`` is another name of the efficiency."""
        values: Json = plain(self) | {
            "time_to_target_s": _or_null(self.time_to_target_s),
            "capacity_used": self.compute_efficiency,
            "keeps_budgets": self.keeps_budgets,
        }
        del values["policy"]
        return values


def summarise(result: PolicyResult) -> Summary:
    """Averages over seeds; percentiles over all rounds; the worst seed against budgets."""
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
        energy_over_budget_max=max(s.energy_over_budget for s in scores),
        time_to_target_s=_mean([s.time_to_target_s for s in scores]),
        decision_s={"median": float(np.median(decision))},
        fallbacks=sum(s.fallbacks for s in scores),
    )


def summaries(simulation: Simulation) -> tuple[Summary, ...]:
    """Every policy that ran."""
    return tuple(summarise(p) for p in simulation.policies if p.refusal is None)


def bound_summary(simulation: Simulation) -> Bounds:
    """Averages over the seeds of the simulation."""
    names = [field.name for field in fields(Bounds)]
    return Bounds(**{n: _mean([getattr(each, n) for each in simulation.bounds]) for n in names})


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Lower quartile, median and upper quartile."""
    found = np.percentile(values, [25, 50, 75])
    return dict(zip(("q1", "median", "q3"), found.tolist(), strict=True))


def policies_json(simulation: Simulation) -> Json:
    """Every policy's averages and seeds; equal settings give equal values but for decision_s."""
    bound_s = bound_summary(simulation).latency_in_budget_s
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
    """Averages, and every seed's."""
    pairs = zip(simulation.setting.seeds, simulation.bounds, strict=True)
    seeds = [{"seed": seed, **plain(each)} for seed, each in pairs]
    return {**plain(bound_summary(simulation)), "seeds": seeds}


def _score_json(score: Score) -> Json:
    return {
        "seed": score.seed,
        "latency_s": list(score.latency_s),
        "queue_share": list(score.queue_share),
        "compute_efficiency": score.compute_efficiency,
        "busy_share": score.busy_share,
        "peak_device_memory_bytes": score.peak_device_memory_bytes,
        "energy_over_budget_max": score.energy_over_budget,
        "time_to_target_s": _or_null(score.time_to_target_s),
        "last_plan": plain(score.last_plan),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _or_null(value: float) -> float | None:
    return value if isfinite(value) else None
