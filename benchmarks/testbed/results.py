"""Medians and quartiles over rounds and repetitions, and the JSON of the bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import log
from statistics import fmean, median, quantiles
from typing import Any

from benchmarks.testbed.runs import Round, Run

LEARNT = 3  # rounds, after which predictions count
Json = dict[str, Any]


def spread(values: Sequence[float]) -> Json:
    """Median and quartiles; one value is all three."""
    ordered = sorted(values)
    low, middle, high = (
        quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    )
    return {"median": middle, "q1": low, "q3": high}


def policy_json(runs: Sequence[Run], target: float, speeds: Mapping[str, float]) -> Json:
    """One policy over its repetitions; ``speeds`` are FLOP/s by device.

    Of a run that did not reach the target, nothing is known but that it takes longer: the time is
    null, unless quartiles fall into runs that did.
    """
    late = [done for run in runs for done in run.rounds[LEARNT:]]
    rounds = [done for run in runs for done in run.rounds]
    times = [run.time_to(target) for run in runs]
    peaks = [memory for run in runs for memory in run.memory.values()]
    return {
        "round_s": {
            **spread([done.round_s for done in rounds]),
            "mean": fmean(done.round_s for done in rounds),
        },
        "time_to_target_s": {**censored(times), "reached": sum(t is not None for t in times)},
        "last_metric": spread([run.rounds[-1].metric for run in runs]),
        "peak_rss_bytes": max(m.peak_bytes for m in peaks),
        "peak_rss_over_idle_bytes": max(m.peak_bytes - m.idle_bytes for m in peaks),
        "energy_j": spread([sum(done.energy_j.values()) for done in rounds]),
        "energy_over_budget_max": max(run.energy_over_budget for run in runs),
        "capacity_used": median(_capacity_used(run, speeds) for run in runs),
        "busy_share": median(_busy_share(done, speeds) for done in rounds),
        "predicted_s": spread([done.predicted_s for done in rounds]),
        "prediction_error": _error([(done.predicted_s, done.round_s) for done in late]),
        "prediction_error_clusters": _error([c for done in late for c in done.clusters]),
        "host_busy_share": median(run.busy_share for run in runs),
    }


def censored(values: Sequence[float | None]) -> Json:
    """Quartiles where some values are known only to be larger than all others."""
    ordered = sorted(v for v in values if v is not None) + [None] * values.count(None)
    if None not in ordered:
        return spread([v for v in ordered if v is not None])
    last = len(ordered) - 1
    ranks = {"median": last / 2, "q1": last / 4, "q3": 3 * last / 4}
    return {name: _between(ordered, rank) for name, rank in ranks.items()}


def _between(ordered: Sequence[float | None], rank: float) -> float | None:
    below, above = ordered[int(rank)], ordered[min(int(rank) + 1, len(ordered) - 1)]
    if rank == int(rank) or below is None or above is None:
        return below if rank == int(rank) else None
    return below + (rank - int(rank)) * (above - below)


def _error(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Median of |ln(predicted / measured)|."""
    return median(abs(log(p / m)) for p, m in pairs) if pairs else None


def _capacity_used(run: Run, speeds: Mapping[str, float]) -> float:
    """Useful FLOPs of all rounds over what all devices could have computed meanwhile."""
    seconds = sum(done.round_s for done in run.rounds)
    return len(run.rounds) * run.useful_flop / (seconds * sum(speeds.values()))


def _busy_share(done: Round, speeds: Mapping[str, float]) -> float:
    """How busy devices with blocks were, weighted by speed."""
    busy = sum(speeds[name] * seconds for name, seconds in done.busy_s.items())
    return busy / (done.round_s * sum(speeds[name] for name in done.busy_s))


def run_json(run: Run) -> Json:
    """One run, round by round."""
    return {
        "policy": run.policy,
        "seed": run.seed,
        "host_busy_share": run.busy_share,
        "memory": {name: asdict(memory) for name, memory in run.memory.items()},
        "rounds": [asdict(done) for done in run.rounds],
    }
