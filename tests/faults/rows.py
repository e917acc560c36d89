"""What the tests of faults record, one row each, and the table that is made of it.

    FAULT_ROWS=rows.jsonl python -m pytest tests/faults        # appends to that file
    python -m tests.faults.rows rows.jsonl                      # records them, writes the table

What is recorded lies in docs/results/faults.json, the table in docs/results-failures.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_KEY = "FAULT_ROWS"
DOCS = Path(__file__).parents[2] / "docs"
RECORDED, DOCUMENT = DOCS / "results/faults.json", DOCS / "results-failures.md"
BEGIN, END = "<!-- table faults -->\n", "<!-- end -->"
PHASES = (
    "planning",
    "placing",
    "forward",
    "training",
    "backward",
    "apply",
    "collecting",
    "replying",
    "aggregating",
    "checkpointing",
    "evaluating",
)
_HEAD = (
    "| who | what happens | training goes on after | steps repeated, at most | how |",
    "|---|---|---:|---:|---|",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault; ``seconds`` is 0 where training did not stop."""

    role: str
    fault: str
    phase: str
    seconds: float
    steps_lost: int
    how: str

    def record(self) -> None:
        """Append it to the file of this run of the tests."""
        if path := os.environ.get(FILE_KEY):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(self)) + "\n")


def read(path: Path = RECORDED) -> list[Row]:
    """What is recorded."""
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def record(path: Path) -> None:
    """Record what the tests appended to a file, and write the table: each fault's last row."""
    lines = path.read_text(encoding="utf-8").splitlines()
    known = read() if RECORDED.exists() else []
    rows = {(row.role, row.fault, row.phase): row for row in known}
    rows |= {(r.role, r.fault, r.phase): r for r in (Row(**json.loads(line)) for line in lines)}
    ordered = sorted(rows.values(), key=lambda row: (row.role, row.fault, _place(row.phase)))
    told = ",\n".join(json.dumps(asdict(row)) for row in ordered)
    RECORDED.write_text(f"[\n{told}\n]\n", encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    DOCUMENT.write_text(
        f"{before}{BEGIN}{table(ordered)}\n{END}{rest.partition(END)[2]}", encoding="utf-8"
    )


def _place(phase: str) -> int:
    return PHASES.index(phase)


def table(rows: Iterable[Row]) -> str:
    """Markdown: one row per fault, over the phases in which it struck and ended alike."""
    faults: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        faults.setdefault((row.role, row.fault, row.how), []).append(row)
    lines = [
        f"| {role} | {fault} | {_seconds(r.seconds for r in found)} "
        f"| {max(r.steps_lost for r in found)} | {how} |"
        for (role, fault, how), found in faults.items()
    ]
    return "\n".join([*_HEAD, *lines])


def _seconds(found: Iterable[float]) -> str:
    """The shortest and the longest."""
    ordered = sorted(found)
    least, most = (f"{seconds:.1f}" for seconds in (ordered[0], ordered[-1]))
    if most == "0.0":
        return "no pause"
    return f"{most} s" if least == most else f"{least} to {most} s"


if __name__ == "__main__":
    record(Path(sys.argv[1]))
