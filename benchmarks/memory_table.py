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
_ROLES = {
    "whole": "whole model",
    "control-unit": "control unit",
    "control-unit-and-edge": "control unit that is the edge",
    "device": "largest of four devices",
    "edge": "edge",
}
_PLACE = re.compile(r"(<!-- table memory -->\n).*?(<!-- end -->)", re.DOTALL)


def read(file: Path) -> list[dict[str, Any]]:
    """The cases that one call of the bench measured."""
    cases: list[dict[str, Any]] = json.loads(file.read_text())["cases"]
    return cases


def table(cases: list[dict[str, Any]]) -> str:
    """One row per model and mode in Markdown: peak GiB by role, MB of a message."""
    lines = [f"| model | mode | {' | '.join(_ROLES.values())} | message MB |"]
    lines.append("|---|---|" + "---:|" * (len(_ROLES) + 1))
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for case in cases:
        row = rows.setdefault((case["model"], case["mode"]), {})
        role = case["role"].partition(" ")[0]
        if role not in row or (case["peak_bytes"] or 0) > (row[role]["peak_bytes"] or 0):
            row[role] = case
    for (model, mode), row in rows.items():
        cells = [_gib(row.get(role)) for role in _ROLES]
        sizes = [case["message_bytes"] for case in row.values() if case.get("message_bytes")]
        cells.append(f"{sizes[0] / 1e6:.1f}" if sizes else "-")
        lines.append(f"| {model} | {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gib(case: dict[str, Any] | None) -> str:
    """The peak of a role; why it was not run."""
    if case is None:
        return "-"
    return (
        str(case["left_out"]) if case["peak_bytes"] is None else f"{case['peak_bytes'] / _GIB:.2f}"
    )


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
