"""``collapipe bench round`` as people see it: progress, a table, a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rounds.measure import PHASES, RoundCase, Timing, measure
from collapipe_flwr.core.processes import terminable
from collapipe_flwr.reporting.output import prepare, write_json


def run_round_bench(sizes: list[str], rounds: int, json_file: Path | None) -> None:
    """Measure, show and write."""
    prepare("--json", json_file)
    console, cases = Console(), []
    with terminable(), Console(stderr=True).status("rounds") as status:
        for case in measure(sizes, rounds, status.update):
            cases.append(case)
            write_json(json_file, {"cases": [asdict(each) for each in cases], "rounds": rounds})
    console.print(_table(cases))


def _table(cases: list[RoundCase]) -> Table:
    table = Table(title="Seconds of a round (medians): overhead is all that is not training")
    for column in ("model", "side"):
        table.add_column(column)
    shown = [name.removesuffix("_s") for name in PHASES]
    for column in (
        "round",
        "overhead",
        "longest",
        *shown,
        "CPU s",
        "app CPU s",
        "app MB",
        "unit MB",
    ):
        table.add_column(column, justify="right")
    for case in cases:
        _add(table, case.model, f"Flower, beside {case.control_unit}", case.flower)
        _add(table, case.model, case.control_unit, case.ours)
    return table


def _add(table: Table, model: str, side: str, timing: Timing) -> None:
    times = (timing.round_s, timing.overhead_s, timing.longest_overhead_s)
    phases = (timing.phases[name] for name in PHASES)
    cpu = (timing.cpu_s, timing.app_cpu_s)
    numbers = [f"{seconds:.2f}" for seconds in (*times, *phases, *cpu)]
    sizes = f"{timing.rss_bytes / 1e6:.0f}", f"{timing.unit_rss_bytes / 1e6:.0f}"
    table.add_row(model, side, *numbers, *sizes)
