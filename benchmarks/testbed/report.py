"""What ``bench testbed`` shows and writes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.testbed.boards import Cluster
from benchmarks.testbed.measure import measure, steps
from benchmarks.testbed.training import Training
from collapipe_flwr.core.processes import exit_on_signals
from collapipe_flwr.reporting.output import number_table, prepare, progress, write_json

COLUMNS = ("round s", "target s", "MB", "J/budget", "used", "error")


def run_testbed(
    clusters: Sequence[Cluster], training: Training, factor: float, json_file: Path | None
) -> None:
    """Measure with a progress bar, print a table, write a file."""
    prepare("--json", json_file)
    with (
        exit_on_signals(),
        tempfile.TemporaryDirectory(prefix="collapipe-testbed-") as folder,
        progress(steps(training)) as tick,
    ):
        result = measure(clusters, training, factor, Path(folder), tick)
    Console(highlight=False).print(testbed_table(result))
    write_json(json_file, result)


def testbed_table(result: Mapping[str, Any]) -> Table:
    """One row per policy."""
    settings = result["settings"]
    title = f"testbed, {settings['slow_down']:.0f} times slower than boards"
    table = number_table(title, ("policy",), COLUMNS)
    for name, policy in result["policies"].items():
        cells = (
            _quartiles(policy["round_s"]),
            _seconds(policy["time_to_target_s"]["median"]),
            f"{policy['peak_rss_bytes'] / 1e6:.0f}",
            f"{policy['energy_over_budget_max']:.2f}",
            f"{policy['capacity_used']:.3f}",
            "" if policy["prediction_error"] is None else f"{policy['prediction_error']:.3f}",
        )
        table.add_row(name, *cells)
    return table


def _quartiles(spread: Mapping[str, float | None]) -> str:
    middle, low, high = (_seconds(spread[key]) for key in ("median", "q1", "q3"))
    return f"{middle} ({low}..{high})"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}"
