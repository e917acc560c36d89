"""What ``bench scheduler`` shows and writes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.decisions import BenchPlan, BenchResult, bench
from benchmarks.scheduling.optimality import Gaps
from benchmarks.scheduling.search_gaps import GapTable
from collapipe_flwr.reporting.output import prepare, progress, write_json


def run_bench(plan: BenchPlan, json_file: Path | None) -> None:
    """Measure with a progress bar, print a table, write a file."""
    prepare("--json", json_file)
    with progress(plan.steps) as tick:
        result = bench(plan, tick)
    Console(highlight=False).print(bench_table(result))
    write_json(json_file, result.as_json())


def bench_table(result: BenchResult) -> Table:
    """Decision times, the radio solvers, and the gaps to brute force and to rivals."""
    table = Table(title="scheduler bench, one thread", title_justify="left", show_header=False)
    for row in result.decisions:
        size = f"{row.clusters} clusters x {row.devices} devices x {row.blocks} blocks"
        size += f", {len(row.codecs)} codecs" if len(row.codecs) > 1 else ""
        times = f"{1e3 * row.median_s:.1f} ms, the first {1e3 * row.first_s:.0f} ms"
        table.add_row(f"one decision, {size}", times)
    if (radio := result.radio) is not None:
        times = f"{1e3 * radio.fast_s:.1f} ms, cvxpy {1e3 * radio.cvxpy_s:.0f} ms"
        table.add_row(f"radio of {radio.clusters} clusters", f"{times}: {radio.speedup:.0f}x")
        table.add_row("radio objective above cvxpy's", f"{radio.relative_gap:.1e}")
    if result.optimality is not None:
        _add_gaps(table, result.optimality)
    for gaps in result.search:
        for part in gaps.tables:
            name = "with queues" if part.queues else "empty queues"
            table.add_row(f"above the best rival, {gaps.size}, {name}", _gap_line(part))
            worst = ", ".join(f"{seed}: {100 * gap:+.3f} %" for seed, gap in part.worst.items())
            table.add_row("  worst seeds", worst)
    return table


def _add_gaps(table: Table, gaps: Gaps) -> None:
    table.add_row(
        f"gap to brute force, {gaps.instances} instances",
        f"mean {100 * gaps.mean_gap:.3f} %, p95 {100 * gaps.quantiles['0.95']:.3f} %, "
        f"p99 {100 * gaps.quantiles['0.99']:.2f} %, worst {100 * gaps.max_gap:.2f} %",
    )
    for part in gaps.histogram:
        edge = "5 % or more" if part.below is None else f"below {100 * part.below:g} %"
        table.add_row(
            f"  {edge}", f"{part.instances} {'#' * round(40 * part.instances / gaps.instances)}"
        )


def _gap_line(part: GapTable) -> str:
    values = (("median", part.median), ("p90", part.p90), ("p99", part.p99), ("max", part.max))
    shown = ", ".join(f"{name} {100 * value:+.3f} %" for name, value in values)
    return f"{part.instances} seeds: {shown}; {part.above} above 1 %"
