"""What a soak recorded, as the table in docs/results-failures.md.

python -m tests.faults.soak_table FILE      # records it in docs/results/soak.json, writes the table
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.faults.rows import DOCS, DOCUMENT, END

RECORDED = DOCS / "results/soak.json"
BEGIN = "<!-- table soak -->\n"
_HEAD = (
    "| what | at half | at the end | per hour | bound |",
    "|---|---|---|---|---|",
)
_SHOWN = 3  # of a kind
_WHAT = {
    "memory_bytes": "MB",
    "descriptors": "descriptors",
    "threads": "threads",
    "disk_bytes": "MB",
}


def record(path: Path) -> None:
    """Keep what a soak wrote, and show it."""
    RECORDED.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    shown = table(json.loads(RECORDED.read_text(encoding="utf-8")))
    DOCUMENT.write_text(f"{before}{BEGIN}{shown}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def table(told: Mapping[str, Any]) -> str:
    """Markdown: what was done, what came of it, and what grew nearest to its bound."""
    return "\n".join([_summary(told), "", *_HEAD, *_rows(told["growths"])])


def _summary(told: Mapping[str, Any]) -> str:
    settings, faults = told["settings"], Counter(fault["kind"] for fault in told["faults"])
    struck = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    failed = [what for what, holds in told["judged"].items() if not holds]
    verdict = f"not held: {'; '.join(failed)}" if failed else "all bounds held"
    return (
        f"{settings['minutes']:.0f} minutes, seed {settings['seed']}, {settings['cores']} cores: "
        f"{told['rounds']:,} rounds ({told['rounds_of_clusters']:,} of single clusters) in "
        f"{told['runs']} runs, {sum(faults.values())} faults ({struck}), longest pause between two "
        f"rounds {told['longest_pause_s']:.0f} s; {verdict}."
    )


def _rows(growths: list[Mapping[str, Any]]) -> Iterator[str]:
    for each in _nearest(growths):
        unit, scale = _WHAT[each["what"]], 1e6 if each["what"].endswith("bytes") else 1.0
        digits = 1 if unit == "MB" else 0
        first, last = (f"{each[key] / scale:,.{digits}f}" for key in ("first", "last"))
        slope, bound = each["per_hour"] / scale, each["bound"] / scale
        mark = "" if each["is_bounded"] else " (beyond)"
        yield f"| {each['of']}: {unit} | {first} | {last} | {slope:+.1f}{mark} | {bound:g} |"


def _nearest(growths: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Of every kind the few that are nearest to their bound."""
    kinds = dict.fromkeys(each["what"] for each in growths)
    for kind in kinds:
        those = [each for each in growths if each["what"] == kind]
        yield from sorted(those, key=lambda each: each["per_hour"] / each["bound"])[-_SHOWN:]


if __name__ == "__main__":
    record(Path(sys.argv[1]))
