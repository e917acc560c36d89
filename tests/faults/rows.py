"""What the tests of faults record, one row each, and the table that is made of it.

    python -m tests.faults.rows docs/results/faults.jsonl      # prints the table

The tests append to the file that `FAULT_ROWS` names, if it does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE_KEY = "FAULT_ROWS"
_HEAD = (
    "| who | what happens | when | training goes on after | steps repeated | how |",
    "|---|---|---|---|---|---|",
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


def read(path: Path) -> list[Row]:
    """The last row of each fault, in the order of the table."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [Row(**json.loads(line)) for line in lines]
    last = {(row.role, row.fault, row.phase): row for row in rows}
    return [last[key] for key in sorted(last)]


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = [
        f"| {row.role} | {row.fault} | {row.phase} | {_seconds(row.seconds)} | {row.steps_lost} "
        f"| {row.how} |"
        for row in rows
    ]
    return "\n".join([*_HEAD, *lines])


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds else "no pause"


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1]))))
