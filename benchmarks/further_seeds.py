"""What further seeds say of a table's claim on latency: DSSDA, the best baseline, and the bound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scheduler_runs import BOUNDED, MORE, PRICED, Json, read

DRAWS = 10_000  # of seeds, for intervals


def more_lines(folder: Path, name: str, run: Json) -> Iterator[str]:
    """The claim on latency over this table's seeds and further ones."""
    runs = [run, *(found for s in MORE.get(name, ()) if (found := read(folder, f"{name}-{s}")))]
    if len(runs) == 1:
        return
    claim = run["comparison"]["claims"]["latency_lower_percent"]
    every = {
        policy: np.concatenate([seed_means(each["policies"][policy]) for each in runs])
        for policy in ("dssda", "fedavg", "splitfed", "uniform")
    }
    rival = min(list(every)[1:], key=lambda policy: every[policy].mean())
    ours, theirs = every["dssda"], every[rival]
    seen, needed = 100.0 * (1.0 - ours.mean() / theirs.mean()), claim["needed"]
    low, high = interval(ours, theirs)
    energy = max(each["policies"]["dssda"]["energy_over_budget_max"] for each in runs)
    kept = "kept" if seen >= needed else f"missed by {needed - seen:.3g}"
    yield ""
    further = ", ".join(MORE[name])
    yield f"**`{name}`, {len(ours)} seeds** (also {further}): {ours.mean():.1f} s a round,"
    yield f"{seen:.2f} % below `{rival}` ({kept}; 95 %: {low:.1f} to {high:.1f} %); the worst"
    yield f"device uses {energy:.3f} of its budget."
    least = bounds_s(folder, name)
    if least is not None and len(least) == len(ours):  # else it is being measured
        possible = 100.0 * (1.0 - least.mean() / theirs.mean())
        above = 100.0 * (ours.mean() / least.mean() - 1.0)
        refuted = "" if possible >= needed else f"**{needed} % cannot be had**, and "
        yield "No scheduler of pipelines that keeps all budgets on average undercuts"
        yield f"{least.mean():.1f} s there with the same batches, {possible:.2f} % below `{rival}`:"
        yield f"{refuted}DSSDA is {above:.2f} % above it."


def bounds_s(folder: Path, name: str) -> NDArray[np.float64] | None:
    """What rounds take at least, seed by seed; None while some are not known."""
    parts = [read(folder, PRICED[name])]
    parts += [read(folder, f"bounds-{name}-{seeds}") for seeds in BOUNDED[name]]
    if any(part is None for part in parts):
        return None
    first, *rest = (part["cases"] for part in parts if part is not None)
    known = [case["bound"] * case["dssda_latency_s"] / case["dssda"] for case in first]
    known += [case["latency_s"] for cases in rest for case in cases]
    return None if None in known else np.array(known)


def interval(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where the per cent that our sum is lower lies for 95 % of drawn sets of seeds."""
    drawn = np.random.default_rng(0).integers(len(ours), size=(DRAWS, len(ours)))
    lower = 1.0 - ours[drawn].sum(axis=1) / theirs[drawn].sum(axis=1)
    return 100.0 * np.quantile(lower, [0.025, 0.975])


def seed_means(policy: Json) -> NDArray[np.float64]:
    """Mean seconds per round of every seed; none where only the mean over all is recorded."""
    return np.array([np.mean(seed["latency_s"]) for seed in policy.get("seeds", [])])
