"""What the demo costs: memory counts all processes once, disk what files really take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collapipe_flwr.benches.demo import DemoCost, folder_bytes, readme_row, tree_bytes

_PARENT = """
import subprocess, sys
child = "x = bytearray(120_000_000); print('ready', flush=True); input()"
subprocess.run([sys.executable, "-c", child])
"""


def test_the_row_is_rounded_up_to_half_minutes_and_whole_megabytes() -> None:
    cost = DemoCost(wall_s=61.0, peak_bytes=2_340_000_000, run_bytes=1_000_001)
    assert readme_row(cost) == "| `make demo` | 1.5 minutes | 2 MB | 2.3 GB |"


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
