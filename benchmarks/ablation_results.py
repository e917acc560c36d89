"""Variants of an ablation held against each other, over the seeds that have all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

TARGETS = (0.45, 0.3, 0.2, 0.1)  # of the untrained loss


def compared(result: dict[str, Any], variants: Sequence[str]) -> dict[str, Any]:
    """``result`` with ratios and quartiles of the seeds that have all variants."""
    whole = [runs for runs in result["seeds"].values() if len(runs) == len(variants)]
    if not whole:
        return result
    ratios_by_name = {name: over_bound(whole, name) for name in variants if name != "bound"}
    spread = {name: quartiles(whole, name) for name in variants}
    return result | {"over_bound": ratios_by_name, "quartiles": spread}


def ratios(runs: dict[str, dict[str, Any]], name: str) -> dict[str, float | None]:
    """Seconds of variant ``name`` over those with the bound; None where either never came."""
    ours, theirs = runs["bound"]["time_to_target_s"], runs[name]["time_to_target_s"]
    return {k: theirs[k] / ours[k] if ours[k] and theirs[k] else None for k in ours}


def over_bound(seeds: list[dict[str, dict[str, Any]]], name: str) -> dict[str, float | None]:
    """Geometric mean over seeds of how many times as long a variant takes, by target."""
    each = [ratios(runs, name) for runs in seeds]
    return {str(share): _mean([ratio[str(share)] for ratio in each]) for share in TARGETS}


def quartiles(seeds: list[dict[str, dict[str, Any]]], name: str) -> dict[str, list[float | None]]:
    """Lower quartile, median and upper quartile over seeds of the seconds to every target.

    None where a quartile falls among the seeds that never arrived.
    """
    found: dict[str, list[float | None]] = {}
    for share in TARGETS:
        times = [runs[name]["time_to_target_s"][str(share)] for runs in seeds]
        values = [math.inf if time is None else time for time in times]
        found[str(share)] = [
            float(q) if math.isfinite(q) else None
            for q in np.percentile(values, [25, 50, 75], method="nearest")
        ]
    return found


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return math.exp(sum(map(math.log, known)) / len(known))
