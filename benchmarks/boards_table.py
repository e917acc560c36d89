"""The tables of docs/choosing.md on boards, predicted and measured.

    python benchmarks/boards_table.py docs/results/boards/*.json --into docs/choosing.md

Shapes are those of `benchmarks.memory.footprint`; nothing is downloaded. Of the files only cases
with a prediction count. Without --into the tables are printed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.memory.footprint import (
    LLAMA_1B,
    LLAMA_3B,
    LLAMA_8B,
    QWEN_4B,
    SMOLLM2,
    ModelSize,
)
from collapipe_flwr.cluster.boards import LEAST_KINDS, Cut, make_cuts
from collapipe_flwr.cluster.forecast import ModelChoice
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.models.spec import FROZEN_DTYPES, BatchShape

SIZES = (SMOLLM2, LLAMA_1B, LLAMA_3B, QWEN_4B, LLAMA_8B)
LENGTH, SIZE, COUNT, RANK, DEVICES = 256, 1, 4, 8, 4
ROOMY = "64gb"
ROLES = {
    "control-unit": "control unit",
    "control-unit-and-edge": "control unit that is the edge",
    "device": "device",
    "edge": "edge",
}
_GIB, _MIB = 2**30, 2**20


def foreseen(size: ModelSize) -> Iterator[Cut]:
    """The model for each frozen type."""
    request = ModelChoice(
        model=size.model_type,
        overrides={**size.overrides, "vocab_size": size.vocabulary},
        shape=BatchShape(source_length=LENGTH),
        lora_rank=RANK,
    )
    yield from make_cuts(request, FROZEN_DTYPES, [LENGTH], [SIZE], COUNT, PricingOptions())


def prediction_table(sizes: Iterable[ModelSize] = SIZES) -> str:
    """One row per model and frozen type in Markdown: GiB by role, and the least boards."""
    least = " | ".join(f"least {kind}" for kind in LEAST_KINDS)
    lines = [
        f"| model | frozen weights | control unit | each of {DEVICES} devices | head | {least} |",
        "|---|---|" + "---:|" * (3 + len(LEAST_KINDS)),
    ]
    for size in sizes:
        for cut in foreseen(size):
            control_unit, head = cut.load_ends(ROOMY, ROOMY)
            device = max(load.bytes for load in cut.spread([ROOMY] * DEVICES))
            figures = [f"{each / _GIB:.2f}" for each in (control_unit.bytes, device, head.bytes)]
            figures += [str(cut.find_least_number(kind) or "none") for kind in LEAST_KINDS]
            lines.append(f"| {size.name} | {cut.setting.frozen_dtype} | {' | '.join(figures)} |")
    return "\n".join(lines)


def measured_table(cases: Iterable[dict[str, Any]]) -> str:
    """One row per model and mode: MiB measured, and how far off it was predicted."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for case in cases:
        if case.get("predicted_bytes") and case["lasting_bytes"]:
            row = rows.setdefault((case["model"], case["mode"]), {})
            known = row.setdefault(case["role"].partition(" ")[0], case)
            row[case["role"].partition(" ")[0]] = max(known, case, key=_lasting)
    lines = [f"| model | mode | {' | '.join(ROLES.values())} |", "|---|---|" + "---:|" * len(ROLES)]
    for (model, mode), row in rows.items():
        cells = [_compared(row[role]) if role in row else "-" for role in ROLES]
        lines.append(f"| {model} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _lasting(case: dict[str, Any]) -> float:
    return float(case["lasting_bytes"])


def _compared(case: dict[str, Any]) -> str:
    seen, said = case["lasting_bytes"], case["predicted_bytes"]
    return f"{seen / _MIB:.0f}, {100 * (said / seen - 1):+.0f} %"


def main() -> None:
    """Print the tables, or put them into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    cases = [case for file in options.files for case in json.loads(file.read_text())["cases"]]
    tables = {"boards": prediction_table(), "boards-measured": measured_table(cases)}
    if options.into is None:
        print("\n\n".join(tables.values()))
        return
    text = options.into.read_text(encoding="utf-8")
    for name, table in tables.items():
        place = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = place.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)
    options.into.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
