"""``collapipe bench memory`` as people see it: progress, a table, a file."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.memory.footprint import MemoryCase, ModelSize, measure
from collapipe_flwr.core.processes import exit_on_signals
from collapipe_flwr.reporting.output import prepare, write_json

_GIB = 2**30


def run_memory_bench(
    sizes: list[ModelSize],
    modes: list[str],
    roles: list[str],
    limit_gib: float,
    json_file: Path | None,
) -> None:
    """Measure, show and write."""
    prepare("--json", json_file)
    console = Console()
    with (
        exit_on_signals(),
        tempfile.TemporaryDirectory(prefix="collapipe-") as folder,
        console.status("memory") as status,
    ):
        cases = measure(sizes, modes, Path(folder), int(limit_gib * _GIB), status.update, roles)
    console.print(_table(cases))
    for case in cases:
        if case.left_out:
            console.print(f"left out: {case.model} {case.mode} {case.role} {case.left_out}")
    write_json(json_file, {"cases": [asdict(case) for case in cases], "limit_gib": limit_gib})


def _table(cases: list[MemoryCase]) -> Table:
    table = Table(title="Peak resident memory in GiB, one process per role")
    for column in (
        "model",
        "mode",
        "role",
        "peak",
        "anonymous",
        "whole model",
        "ratio",
        "state by profile",
        "predicted",
        "of it lasting",
        "message",
        "edge's part",
    ):
        table.add_column(column, justify="left" if column in ("model", "mode", "role") else "right")
    for case in cases:
        ratio = "-" if case.ratio is None else f"{case.ratio:.2f}"
        whole = ("" if case.whole_model_measured else "> ") + _size(case.whole_model_peak_bytes)
        anonymous = _size(case.peak_anonymous_bytes)
        sizes = _size(case.peak_bytes), anonymous, whole, ratio, _size(case.needed_bytes)
        foreseen = _size(case.predicted_bytes), _size(case.lasting_bytes)
        carried = _size(case.message_bytes), _size(case.edge_message_bytes)
        table.add_row(case.model, case.mode, case.role, *sizes, *foreseen, *carried)
    return table


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count / _GIB:.2f}"
