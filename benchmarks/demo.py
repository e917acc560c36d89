"""What the demo costs on this machine: time, disk, and memory of all its processes together.

Memory is the largest sum, over the processes that ran at one time, of what the kernel calls their
proportional set size: pages that several share count once. Wall-clock seconds say little beside
other work, so CPU seconds of the demo and of all that ran beside it stand with them. Linux only.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.core.processes import exit_on_signals

LOOK_S = 0.25
_DEADLINE_S = 3600.0
_PROC = Path("/proc")
_IDLE, _GUESTS = (3, 4), 8  # columns of /proc/stat; from guests on, all is counted already
_ALONE_CORES = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCost:
    """``others_cpu_s``: all other work but the looking; ``run_bytes``: what the run leaves."""

    wall_s: float
    cpu_s: float
    others_cpu_s: float
    peak_bytes: int
    run_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    parent: int
    cpu_s: float


def readme_row(cost: DemoCost) -> str:
    """The demo's line in README's table; half minutes are rounded up."""
    minutes, cpu_minutes = (math.ceil(seconds / 30) / 2 for seconds in (cost.wall_s, cost.cpu_s))
    beside = " beside other work" if cost.others_cpu_s > _ALONE_CORES * cost.wall_s else ""
    disk, memory = math.ceil(cost.run_bytes / 1e6), cost.peak_bytes / 1e9
    took = f"{minutes:g} minutes{beside} ({cpu_minutes:g} of CPU time)"
    return f"| `make demo` | {took} | {disk} MB | {memory:.1f} GB |"


def measure_demo(project: Path) -> DemoCost:
    """Run what `make demo` runs; raises RunError if it fails, ConfigError without Linux' /proc."""
    if not (_PROC / "self/smaps_rollup").exists():
        raise ConfigError("bench demo reads /proc/PID/smaps_rollup, which only Linux has")
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="collapipe-demo-") as folder:
        start_s, busy_s, own_s = time.monotonic(), machine_busy_s(), time.process_time()
        peak_bytes, cpu_s = _run(project, Path(folder) / "runs", Path(folder) / "log")
        looking_s = time.process_time() - own_s  # the kernel counts pages at every look
        return DemoCost(
            wall_s=time.monotonic() - start_s,
            cpu_s=cpu_s,
            others_cpu_s=max(0.0, machine_busy_s() - busy_s - cpu_s - looking_s),
            peak_bytes=peak_bytes,
            run_bytes=folder_bytes(Path(folder) / "runs"),
        )


def _run(project: Path, output_dir: Path, log: Path) -> tuple[int, float]:
    """Run to the end; the peak memory, and CPU seconds but for a process's last quarter second."""
    command = [sys.executable, "-m", "collapipe_flwr.cli.child", "run", str(project)]
    command += ["--federation-config", str(project / "sim.toml"), "--output-dir", str(output_dir)]
    deadline_s, peak_bytes = time.monotonic() + _DEADLINE_S, 0
    cpu_s: dict[int, float] = {}
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file) as process,
    ):
        while process.poll() is None and time.monotonic() < deadline_s:
            peak_bytes = max(peak_bytes, tree_bytes(process.pid))
            cpu_s |= tree_cpu_s(process.pid)
            try:
                process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        process.terminate()  # nothing to end unless the deadline is over
    if process.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise RunError(f"the demo failed: {last[0] if last else 'no output'}")
    return peak_bytes, sum(cpu_s.values())


def machine_busy_s() -> float:
    """CPU seconds that this machine has worked since it started, all cores together."""
    ticks = [int(value) for value in (_PROC / "stat").read_text().splitlines()[0].split()[1:]]
    busy = sum(ticks[:_GUESTS]) - sum(ticks[column] for column in _IDLE)
    return busy / os.sysconf("SC_CLK_TCK")


def tree_bytes(root: int) -> int:
    """Memory of a process and all that descend from it, now."""
    return sum(_pss_bytes(pid) for pid in _tree(root))


def tree_cpu_s(root: int) -> dict[int, float]:
    """CPU seconds so far of a process and of all that descend from it, each by itself."""
    return {pid: process.cpu_s for pid, process in _tree(root).items()}


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take on disk; links are not followed."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def _tree(root: int) -> dict[int, _Process]:
    processes = dict(_processes())
    return {pid: found for pid, found in processes.items() if _descends(pid, root, processes)}


def _processes() -> Iterable[tuple[int, _Process]]:
    for folder in _PROC.glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        fields = stat.rpartition(")")[2].split()  # from the third of proc(5) on
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        yield int(folder.name), _Process(parent=int(fields[1]), cpu_s=cpu_s)


def _descends(pid: int, root: int, processes: dict[int, _Process]) -> bool:
    while pid != root and pid in processes:
        pid = processes[pid].parent
    return pid == root


def _pss_bytes(pid: int) -> int:
    try:
        lines = (_PROC / f"{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0  # it has just ended
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
