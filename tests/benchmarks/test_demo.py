"""README says of the demo what was measured; memory and CPU seconds count every process once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.demo import (
    DemoCost,
    folder_bytes,
    machine_busy_s,
    readme_row,
    tree_bytes,
    tree_cpu_s,
)

ROOT = Path(__file__).parents[2]
_PARENT = """
import subprocess, sys
child = "x = bytearray(120_000_000); print('ready', flush=True); input()"
subprocess.run([sys.executable, "-c", child])
"""


_ALONE = DemoCost(
    wall_s=61.0, cpu_s=95.0, others_cpu_s=0.5, peak_bytes=2_340_000_000, run_bytes=1_000_001
)


def test_readme_shows_the_recorded_measurement() -> None:
    cost = DemoCost(**json.loads((ROOT / "docs/results/demo.json").read_text(encoding="utf-8")))
    assert readme_row(cost) in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_the_row_is_rounded_up_to_half_minutes_and_whole_megabytes() -> None:
    assert readme_row(_ALONE) == "| `make demo` | 1.5 minutes (2 of CPU time) | 2 MB | 2.3 GB |"


def test_the_row_says_that_the_machine_was_not_free() -> None:
    busy = replace(_ALONE, others_cpu_s=61.0)
    assert "| 1.5 minutes beside other work (2 of CPU time) |" in readme_row(busy)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_work_of_a_child_is_in_the_tree_and_in_the_machine() -> None:
    work = "x = 0\nwhile x < 10**9: x += 1"
    before_s = machine_busy_s()
    with subprocess.Popen([sys.executable, "-c", work]) as process:
        deadline_s = time.monotonic() + 60
        while (cpu_s := tree_cpu_s(process.pid)[process.pid]) < 0.5:
            assert time.monotonic() < deadline_s
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
        assert machine_busy_s() - before_s > 0.9 * cpu_s
        process.kill()
    assert tree_cpu_s(process.pid) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_counts_children_of_children_and_nobody_else() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        assert 120_000_000 < tree_bytes(process.pid) < 180_000_000
        process.communicate(b"\n", timeout=60)
    assert tree_bytes(process.pid) == 0


def test_a_folder_takes_the_blocks_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    before = folder_bytes(tmp_path)
    (tmp_path / "deep" / "file").write_bytes(b"x" * 100_000)
    assert 100_000 <= folder_bytes(tmp_path) - before < 120_000
