"""What ``results_scheduler`` writes about the search and its rivals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from benchmarks.scheduling.search_gaps import SearchCase, SearchGaps, gap_tables

Json = dict[str, Any]


def pooled(runs: Sequence[Json]) -> Iterator[SearchGaps]:
    """Every size once, over the seeds of all runs in a row that have it."""
    results = [result for run in runs for result in run["search"]]
    for size, group in groupby(results, key=lambda result: result["size"]):
        parts = list(group)
        cases = tuple(SearchCase(**case) for part in parts for case in part["cases"])
        first, last = (part["seeds"].split("-") for part in (parts[0], parts[-1]))
        yield SearchGaps(
            size=size, seeds=f"{first[0]}-{last[-1]}", tables=gap_tables(cases), cases=cases
        )


def search_lines(runs: Sequence[Json], command: str) -> Iterator[str]:
    """The distribution of gaps at every size."""
    yield from ("", "## The search against its rivals", "")
    yield f"`{command} SIZE=SEEDS`: first decisions from scratch against the best of"
    yield "a hill climb from many starts, simulated annealing and, for up to six devices and empty"
    yield "queues, exact shortest paths; rivals share no code with the search, and their radio is"
    yield "then optimised, too. The schedule is GPipe unless the size names another; steps of 1F1B"
    yield "are played. Gaps are of the objective, with empty queues the larger of that and rho T;"
    yield "below zero all rivals are worse."
    yield from ("", "| size and seeds | queues | median | p99 | worst | above 1 % |")
    yield "|---|---|---:|---:|---:|---:|"
    for result in pooled(runs):
        for table in result.tables:
            queues = "drawn" if table.queues else "empty"
            figures = (table.median, table.p99, table.max)
            gaps = (f"{100 * figure:+.3f} %" for figure in figures)
            above = f"{table.above}/{table.instances}"
            cells = (f"{result.size}={result.seeds}", queues, *gaps, above)
            yield f"| {' | '.join(cells)} |"
