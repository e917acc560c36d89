"""The table of docs/lora.md from files that `collapipe bench memory --json FILE` wrote.

    python benchmarks/memory_table.py docs/results/memory/*.json --into docs/lora.md

Without --into it is printed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

_GIB = 2**30
_PLACE = re.compile(r"(<!-- table memory -->\n).*?(<!-- end -->)", re.DOTALL)


def read(file: Path) -> list[dict[str, Any]]:
    """The cases that one call of the bench measured."""
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return cases


def table(cases: list[dict[str, Any]]) -> str:
    """One row per role in Markdown, GiB, of devices the largest; say what was left out and why."""
    lines = [
        "| model | mode | role | peak GiB | of it anonymous | of the whole model | message MB "
        "| of it the edge's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    largest: dict[tuple[str, str, str], dict[str, Any]] = {}
    for case in cases:
        key = (case["model"], case["mode"], case["role"].partition(" ")[0])
        known = largest.setdefault(key, case)
        if (case["peak_bytes"] or 0) > (known["peak_bytes"] or 0):
            largest[key] = case
    return "\n".join([*lines, *map(_row, largest.values())])


def _row(case: dict[str, Any]) -> str:
    start = f"| {case['model']} | {case['mode']} | {case['role']} |"
    if case["peak_bytes"] is None:
        return f"{start} not run: {case['left_out']} | - | - | - | - |"
    share = f"{case['ratio']:.2f}"
    if not case["whole_model_measured"]:
        share += " of its state alone"
    return (
        f"{start} {case['peak_bytes'] / _GIB:.2f} | {case['peak_anonymous_bytes'] / _GIB:.2f} "
        f"| {share} | {_mb(case, 'message_bytes')} | {_mb(case, 'edge_message_bytes')} |"
    )


def _mb(case: dict[str, Any], name: str) -> str:
    """Megabytes of a control unit's message; files of earlier versions have none."""
    size = case.get(name)
    return "-" if size is None else f"{size / 1e6:.1f}"


def main() -> None:
    """Print the table, or put it into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    text = table([case for file in options.files for case in read(file)])
    if options.into is None:
        print(text)
        return
    document = options.into.read_text(encoding="utf-8")
    options.into.write_text(_PLACE.sub(rf"\g<1>{text}\n\g<2>", document), encoding="utf-8")


if __name__ == "__main__":
    main()
