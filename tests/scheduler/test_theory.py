"""Every test that docs/theory.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists() -> None:
    named = set(re.findall(r"\btest_\w+(?!\w*\.py)\b", (ROOT / "docs/theory.md").read_text()))
    files = (
        path for folder in ("costs", "scheduler") for path in (ROOT / "tests" / folder).iterdir()
    )
    defined = set()
    for path in files:
        if path.suffix == ".py":
            defined |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text())}
    assert len(named) > 25
    assert named <= defined, sorted(named - defined)
