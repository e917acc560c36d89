"""The section of docs/results-scheduler.md about what ``ablation_bound.py`` measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]
ABLATIONS = ("number-words", "leading-digit")  # tasks, each with a file of its own
LEAST_SEEDS = 5
VARIANTS = {
    "bound": ("bound", "`scheduler.progress = bound`"),
    "noise_scale": ("noise scale", "`scheduler.progress = noise-scale`, measured as it trains"),
    "small_batch": (
        "small batch",
        "neither, and micro-batches of 1: a batch that somebody who knew this task might set",
    ),
}
SAYS = {
    "number-words": "Number words to digits, a small Marian",
    "leading-digit": "The thousands of a number in words, a small BERT that classifies",
}


def ablation_lines(runs: Sequence[Json]) -> Iterator[str]:
    """What each choice of batches buys in real training."""
    first = runs[0]
    rule = first["training"]["optimizer"]
    yield from ("", f"## Batches in real training ({rule['name']}, rate {rule['learning_rate']:g})")
    yield from ("", "`python benchmarks/ablation_bound.py --task TASK --seeds SEEDS`, with")
    yield f"{first['clusters']} clusters of {first['devices']} boards and"
    yield f"{first['examples_per_round']} examples a round each. Seconds are those of the plans"
    yield "(simulated); clusters train the planned batches unsplit. Targets are shares of the"
    yield "untrained test loss. Variants:"
    ran = list(VARIANTS)
    yield from ("", *(f"- **{VARIANTS[name][0]}**: {VARIANTS[name][1]}" for name in ran))
    for run in runs:
        if "quartiles" in run:
            yield from _task_lines(run, ran)


def _task_lines(run: Json, ran: Sequence[str]) -> Iterator[str]:
    task = run["training"]["task"]
    whole = {seed: runs for seed, runs in run["seeds"].items() if all(n in runs for n in ran)}
    says = f"**{SAYS[task]}**, seeds {', '.join(whole)}"
    yield from ("", f"{says}: seconds, median")
    if len(whole) < LEAST_SEEDS:
        yield f"(only {len(whole)} of {LEAST_SEEDS} seeds are measured so far)"
    yield from ("", "| variant | mean batch | " + " | ".join(_goals(run)) + " |")
    yield "|---|---:|" + "---:|" * len(run["targets"])
    for name in ran:
        means = [runs[name]["batch_mean"] for runs in whole.values()]
        times = [_middle(each) for each in run["quartiles"][name].values()]
        batch = f"{sum(means) / len(means):.1f}"
        yield f"| {VARIANTS[name][0]} | {batch} | {' | '.join(times)} |"
    for name in ran:
        if name != "bound":
            cells = " | ".join(map(_ratio, run["over_bound"][name].values()))
            yield f"| **{VARIANTS[name][0]} / bound**, geometric mean | | {cells} |"


def _goals(run: Json) -> list[str]:
    """Column titles of the targets."""
    return [f"to {100 * share:g} %" for share in run["targets"]]


def _middle(quartiles: Sequence[float | None]) -> str:
    return "never" if (median := quartiles[1]) is None else f"{median:.2f}"


def _ratio(value: float | None) -> str:
    """How many times as long; a dash where one of both never arrived in some seed."""
    return "-" if value is None else f"{value:.2f}"
