"""What ``bench pipeline`` and ``bench codecs`` show and write.

``python -m benchmarks.data_plane.report FILE`` prints a file of ``bench pipeline`` as Markdown for
docs/results-pipeline.md; a test compares the page with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.data_plane.cases import EQUAL, LOOPBACK
from benchmarks.data_plane.codecs import AUTO, CodecTask, Trained, train_with_codecs
from benchmarks.data_plane.pipeline import BenchPlan, Json, bench
from benchmarks.data_plane.recovery import measure_recovery
from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.core.processes import exit_on_signals
from collapipe_flwr.reporting.output import prepare, progress, write_json

_MIB = 2**20
_TITLE = "step time beside torch.distributed.pipelining, medians of turns"
_TEXTBOOK = "the same where our 1F1B warms up as the textbook's, not as planned"
_COLUMNS = ("schedule", "our split", "torch's", "in flight", "torch's", "slow", "codec")
_NUMBERS = ("step s", "torch s", "ratio", "late")
_HEAD = f"| {' | '.join(_COLUMNS + _NUMBERS)} |\n|{'---|' * len(_COLUMNS)}{'---:|' * len(_NUMBERS)}"


def run_pipeline_bench(plan: BenchPlan, json_file: Path | None) -> None:
    """Measure with a progress bar, print tables, write a file."""
    prepare("--json", json_file)
    with exit_on_signals(), progress(plan.ticks) as tick:
        result = bench(plan, tick, measure_recovery)
    console = Console(highlight=False)
    console.print(case_table(_TITLE, cast("Sequence[Json]", result["cases"])))
    console.print(case_table(_TEXTBOOK, cast("Sequence[Json]", result["textbook_depths"])))
    console.print(codec_table(cast("Sequence[Json]", result["codecs"])))
    for sentence in sentences(result):
        console.print(sentence, markup=False)
    write_json(json_file, result)


def run_codec_bench(case: CodecTask, json_file: Path | None) -> None:
    """Train with a progress bar, print a table, write a file."""
    prepare("--json", json_file)
    torch.set_num_threads(1)  # the hosts are threads of this process, a core each
    with progress(case.ticks) as tick:
        rows: tuple[Trained, ...] = train_with_codecs(case, tick)
    values = cast("list[Json]", to_plain(rows))
    Console(highlight=False).print(codec_table(values))
    write_json(json_file, {"settings": to_plain(case), "codecs": values})


def case_table(title: str, cases: Sequence[Json]) -> Table:
    """One line per case; `ratio` and CPU over the peer's, `late` over the bound."""
    table = _table(title, ("schedule", "split", "torch's", "slow", "codec"))
    for name in ("s", "torch s", "ratio", "CPU", "late"):
        table.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        names = (case["schedule"], case["split"], case["torch_pipelining_split"], _slow(case))
        keys = ("step_s", "torch_pipelining_step_s")
        ratios = ("ratio", "cpu_ratio", "bound_ratio")
        cells = (*(f"{case[k]:.3f}" for k in keys), *(f"{case[k]:.2f}" for k in ratios))
        table.add_row(*map(str, names), str(case["codec"]), *cells)
    return table


def codec_table(rows: Sequence[Json]) -> Table:
    """One line per codec: medians over the seeds, and the range of test losses."""
    title = "the built-in task by codec of the links, medians of seeds; MiB on all links"
    table = _table(title, ("codec", "products"))
    for name in ("loss", "test loss", "of seeds", "metric", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*codec_cells(row))
    return table


def codec_cells(row: Json) -> tuple[str, ...]:
    """One codec as text, column by column."""
    tests = cast("Sequence[float]", row["test_losses"])
    return (
        *(codec_name(row), str(row["precision"])),
        *(f"{row['loss']:.4f}", f"{row['test_loss']:.4f}"),
        f"{min(tests):.3f}-{max(tests):.3f}",
        *(f"{row['metric']:.3f}", f"{cast('int', row['link_bytes']) / _MIB:.1f}"),
    )


def codec_name(row: Json) -> str:
    """One codec, or those of the hops where a plan chose them."""
    hops = cast("Sequence[str]", row.get("hops", ()))
    return f"{row['codec']}: {'-'.join(hops)}" if row["codec"] == AUTO else str(row["codec"])


def sentences(result: Json) -> list[str]:
    """The parts that are single numbers, and what was left out."""
    wire = cast("Mapping[str, float]", result["wire"])
    memory = cast("Mapping[str, float]", result["memory"])
    lines = [
        f"wire: {wire['cpu_s_per_gb']:.2f} CPU s/GB plain, {wire['tls_cpu_s_per_gb']:.2f} with "
        f"mutual TLS; a step with it takes {wire['tls_ratio']:.3f} of one without",
        f"memory: a device peaks at {memory['device_peak_bytes'] / _MIB:.0f} MiB, the whole model "
        f"at {memory['whole_model_peak_bytes'] / _MIB:.0f} MiB: {memory['ratio']:.3f}; what it "
        f"must hold is {memory['device_floor_bytes'] / _MIB:.0f} MiB, and "
        f"{memory['device_idle_bytes'] / _MIB:.0f} MiB are interpreter and libraries",
    ]
    recovery = cast("Mapping[str, float] | None", result["recovery"])
    if recovery is not None:
        lines.append(
            f"recovery: a killed device is noticed in {recovery['detect_s']:.2f} s, training goes "
            f"on after {recovery['resume_s']:.2f} s"
        )
    return lines + [f"left out: {why}" for why in cast("Sequence[str]", result["left_out"])]


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def markdown(result: Mapping[str, Any]) -> str:
    """The tables of cases, and a paragraph of the single numbers."""
    tables = [f"{_HEAD}\n{_rows(result[key])}\n" for key in ("cases", "textbook_depths")]
    return "\n".join(
        [
            tables[0],
            "The same with the textbook's warm-up on both sides:\n",
            tables[1],
            f"{_paragraph(result)}\n",
        ]
    )


def _rows(cases: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(f"| {' | '.join(_cells(case))} |" for case in cases)


def _cells(case: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        *(case["schedule"], case["split"], case["torch_pipelining_split"]),
        *(_in_flight(case[key]) for key in ("depths", "torch_pipelining_depths")),
        *(_slow(case), case["codec"]),
        *(f"{case[key]:.3f}" for key in ("step_s", "torch_pipelining_step_s")),
        *(f"{case[key]:.2f}" for key in ("ratio", "bound_ratio")),
    )


def _slow(case: Mapping[str, Any]) -> str:
    return "link" if case["link"] != LOOPBACK else "device" if case["device"] != EQUAL else ""


def _in_flight(depths: Sequence[int]) -> str:
    return " ".join(map(str, depths))


def _paragraph(result: Mapping[str, Any]) -> str:
    wire, memory = result["wire"], result["memory"]
    lines = [
        f"A gigabyte moved costs {wire['cpu_s_per_gb']:.2f} CPU seconds, "
        f"{wire['tls_cpu_s_per_gb']:.2f} with mutual TLS.",
        f"A device of {len(memory['device_peaks_bytes'])} peaks at "
        f"{memory['device_peak_bytes'] / _MIB:.0f} MiB, the whole model at "
        f"{memory['whole_model_peak_bytes'] / _MIB:.0f} MiB ({memory['ratio']:.3f}).",
    ]
    if "device_floor_bytes" in memory:
        lines.append(
            f"Its tensors need {memory['device_floor_bytes'] / _MIB:.0f} MiB, "
            f"{memory['device_state_bytes'] / _MIB:.0f} of them weights, gradients and optimizer "
            "state."
        )
    if result["recovery"] is not None:
        seconds = result["recovery"]
        lines.append(
            f"A killed device was noticed after {seconds['detect_s']:.2f} s and training went on "
            f"after {seconds['resume_s']:.2f} s."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
