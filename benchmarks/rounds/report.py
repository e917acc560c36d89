"""``collapipe bench round`` as people see it: progress, a table, a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rounds.measure import PHASES, RoundCase, Timing, measure
from collapipe_flwr.core.processes import exit_on_signals
from collapipe_flwr.reporting.output import prepare, write_json


def run_round_bench(sizes: list[str], rounds: int, json_file: Path | None) -> None:
    """Measure, show and write."""
    prepare("--json", json_file)
    console, cases = Console(), []
    with exit_on_signals(), Console(stderr=True).status("rounds") as status:
        for case in measure(sizes, rounds, status.update):
            cases.append(case)
            write_json(json_file, {"cases": [asdict(each) for each in cases], "rounds": rounds})
    console.print(_table(cases))


def _table(cases: list[RoundCase]) -> Table:
    """A model's sides stand beside each other, which fits into 80 columns."""
    table = Table("", *(f"{case.model}\n{case.control_unit}\n(Flower)" for case in cases))
    table.title = "Seconds of a round (medians): overhead is all that is not training"
    for column in table.columns[1:]:
        column.justify = "right"
    sides = [(_measures(case.ours), _measures(case.flower)) for case in cases]
    for name in sides[0][0] if sides else ():
        table.add_row(name, *(f"{ours[name]} ({flower[name]})" for ours, flower in sides))
    return table


def _measures(timing: Timing) -> dict[str, str]:
    """What a row is called, and its number."""
    seconds = {
        "round": timing.round_s,
        **{f"  {name.removesuffix('_s')}": timing.phases[name] for name in PHASES},
        "overhead": timing.overhead_s,
        "  longest": timing.longest_overhead_s,
        "CPU": timing.cpu_s,
        "ClientApp CPU": timing.app_cpu_s,
    }
    sizes = {"ClientApp MB": timing.rss_bytes, "unit MB": timing.unit_rss_bytes}
    sizes["to fork MB"] = timing.ready_rss_bytes
    told = {name: f"{value:.2f}" for name, value in seconds.items()}
    return told | {name: f"{size / 1e6:.0f}" for name, size in sizes.items()}
