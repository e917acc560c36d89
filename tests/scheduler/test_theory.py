"""Every test that docs/theory.md names exists, in the file that it names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"(?:`|/)(test_\w+)\.py|::(test_\w+)|`(test_\w+)`")


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, test) in order; ``::test`` belongs to the file named last, a bare name to any."""
    found, file = [], ""
    for match in NAMED.finditer(text):
        file = match[1] or file
        if match[2] or match[3]:
            found.append((file if match[2] else "", match[2] or match[3]))
    return found


def defined_tests() -> set[tuple[str, str]]:
    folders = ("core", "costs", "scheduler", "simulation", "federation", "benchmarks")
    files = (p for folder in folders for p in (ROOT / "tests" / folder).iterdir())
    return {
        (name, test)
        for path in files
        if path.suffix == ".py"
        for test in re.findall(r"def (test_\w+)", path.read_text())
        for name in ("", path.stem)
    }


def test_every_named_test_exists() -> None:
    named = named_tests((ROOT / "docs/theory.md").read_text())
    assert len(named) > 40
    assert not [pair for pair in named if pair not in defined_tests()]


def test_a_test_that_is_not_there_is_found_missing() -> None:
    text = "`scheduler/test_theory.py::test_every_named_test_exists`, `::test_nowhere`, `test_none`"
    missing = [pair for pair in named_tests(text) if pair not in defined_tests()]
    assert missing == [("test_theory", "test_nowhere"), ("", "test_none")]
