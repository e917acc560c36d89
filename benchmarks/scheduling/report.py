"""What ``bench scheduler`` shows and writes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.scheduling.decisions import BenchResult, bench, bench_plan
from collapipe_flwr.reporting.output import prepare, progress, write_json


def run_bench(clusters: tuple[int, ...], instances: int, json_file: Path | None) -> None:
    """Measure with a progress bar, print a table, write a file."""
    plan = bench_plan(clusters, instances)
    prepare("--json", json_file)
    with progress(plan.steps) as tick:
        result = bench(plan, tick)
    Console(highlight=False).print(bench_table(result))
    write_json(json_file, result.as_json())


def bench_table(result: BenchResult) -> Table:
    """Decision times, the radio solvers, and the gap to brute force."""
    table = Table(title="scheduler bench, one thread", title_justify="left", show_header=False)
    for row in result.decisions:
        size = f"{row.clusters} clusters x {row.devices} devices x {row.blocks} blocks"
        size += f", {len(row.codecs)} codecs" if len(row.codecs) > 1 else ""
        table.add_row(f"one decision, {size}", f"{1e3 * row.median_s:.1f} ms")
    radio, gaps = result.radio, result.optimality
    table.add_row(
        f"radio of {radio.clusters} clusters",
        f"{1e3 * radio.fast_s:.1f} ms, cvxpy {1e3 * radio.cvxpy_s:.0f} ms: {radio.speedup:.0f}x",
    )
    table.add_row("radio objective above cvxpy's", f"{radio.relative_gap:.1e}")
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
    return table
