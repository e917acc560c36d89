"""What the demo costs on this machine: time, disk, and memory of all its processes together.

Memory is the largest sum, over the processes that ran at one time, of what the kernel calls their
proportional set size: pages that several share count once. Linux only.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError, RunError

LOOK_S = 0.25
_DEADLINE_S = 3600.0
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCost:
    """``run_bytes`` is the size of what the run leaves behind."""

    wall_s: float
    peak_bytes: int
    run_bytes: int


def readme_row(cost: DemoCost) -> str:
    """The demo's line in README's table; half minutes are rounded up."""
    minutes = math.ceil(cost.wall_s / 30) / 2
    disk, memory = math.ceil(cost.run_bytes / 1e6), cost.peak_bytes / 1e9
    return f"| `make demo` | {minutes:g} minutes | {disk} MB | {memory:.1f} GB |"


def measure_demo(project: Path) -> DemoCost:
    """Run what `make demo` runs; raises RunError if it fails, ConfigError without Linux' /proc."""
    if not (_PROC / "self/smaps_rollup").exists():
        raise ConfigError("bench demo reads /proc/PID/smaps_rollup, which only Linux has")
    with tempfile.TemporaryDirectory(prefix="collapipe-demo-") as folder:
        start_s = time.monotonic()
        peak_bytes = _run(project, Path(folder) / "runs", Path(folder) / "log")
        return DemoCost(
            wall_s=time.monotonic() - start_s,
            peak_bytes=peak_bytes,
            run_bytes=folder_bytes(Path(folder) / "runs"),
        )


def _run(project: Path, output_dir: Path, log: Path) -> int:
    """Run to the end; the peak memory."""
    command = [str(Path(sys.executable).parent / "collapipe"), "run", str(project)]
    command += ["--federation-config", str(project / "sim.toml"), "--output-dir", str(output_dir)]
    deadline_s, peak_bytes = time.monotonic() + _DEADLINE_S, 0
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        while process.poll() is None and time.monotonic() < deadline_s:
            peak_bytes = max(peak_bytes, tree_bytes(process.pid))
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        process.terminate()  # nothing to end unless the deadline is over
    if process.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RunError(f"the demo failed: {last[0] if last else 'no output'}")
    return peak_bytes


def tree_bytes(root: int) -> int:
    """Memory of a process and all that descend from it, now."""
    parents = dict(_parents())
    return sum(_pss_bytes(pid) for pid in parents if _descends(pid, root, parents))


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take on disk; links are not followed."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _parents() -> Iterable[tuple[int, int]]:
    for folder in _PROC.glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        yield int(folder.name), int(stat.rpartition(")")[2].split()[1])


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root and pid in parents:
        pid = parents[pid]
    return pid == root


def _pss_bytes(pid: int) -> int:
    try:
        lines = (_PROC / f"{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
