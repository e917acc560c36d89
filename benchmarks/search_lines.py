"""What ``results_scheduler`` writes about the search and its rivals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Json = dict[str, Any]


def search_lines(runs: Sequence[Json], command: str) -> Iterator[str]:
    """The distribution of gaps at every size, and the worst seeds."""
    yield from ("", "## The search against its rivals", "")
    yield f"`{command} SIZE=SEEDS`: first decisions from scratch against the best of"
    yield "a hill climb from many starts, simulated annealing and, for up to six devices and empty"
    yield "queues, exact shortest paths. Rivals share no code with the search, work at full power"
    yield "and equal bandwidth, and then get bandwidth and power as the scheduler chooses them. The"
    yield "schedule is GPipe unless the size names another; steps of 1F1B are played. Gaps are of"
    yield "the objective, with empty queues the larger of that and rho T; below zero all are worse."
    yield from (
        "",
        "| size | seeds | queues | median | p90 | p99 | worst | above 1 % | worst seeds |",
    )
    yield "|---|---|---|---:|---:|---:|---:|---:|---|"
    for run in runs:
        for result in run["search"]:
            for table in result["tables"]:
                queues = "drawn" if table["queues"] else "empty"
                gaps = (f"{100 * table[key]:+.3f} %" for key in ("median", "p90", "p99", "max"))
                above = f"{table['above']} of {table['instances']}"
                worst = ", ".join(list(table["worst"])[:3])
                cells = (result["size"], result["seeds"], queues, *gaps, above, worst)
                yield f"| {' | '.join(cells)} |"
