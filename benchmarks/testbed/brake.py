"""Processes that get a share of one processor: by a quota of the kernel, or by stopping them.

A quota (cgroup, version 1 or 2) is a millisecond per period, the least that the kernel takes, so
that work of a few milliseconds is slowed down already. Where no group can be made, a thread here
stops a process as soon as it has used more than its share and lets it go on when time has made up
for it: as exact on average, but coarser.

Both look at a process now and then only (Linux at its ticks), and what it has used by then beyond
its share is made up for by time afterwards, in which it may have nothing to do: of five
milliseconds of work that wait for a message between them, three came for free. So a pass of a stage
that ends early waits by itself for the rest, see `pay_for_passes`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.pipeline.meter import Recorder

SHARE_FILE = "COLLAPIPE_TESTBED_SHARE"  # environment: appears with the share when that holds
QUOTA_S = 1e-3
LONGEST_PERIOD_S = 1.0  # that the kernel takes
LOOK_S = 2e-3
_MICRO = 1e6
_NAME = "collapipe"
_CPU_CLOCK = 2  # of all threads of a process: clock_getcpuclockid(3)


@contextmanager
def slowed(shares: Mapping[int, float]) -> Iterator[str]:
    """Give every process, by id, its share of a processor; yields by which means."""
    for kind, root in (("cgroup v1 quota", _version_1()), ("cgroup v2 quota", _version_2())):
        groups = _groups(root, shares) if root else None
        if root is not None and groups is not None:
            try:
                yield kind
            finally:
                _undo(root, groups)
            return
    with _duty_cycle(shares):
        yield "stop and continue"


def pay_for_passes() -> None:
    """Let every timed pass of a stage in this process take as long as its share makes it."""
    share_file, timed = Path(os.environ[SHARE_FILE]), Recorder.record

    @contextmanager
    def paid(self: Recorder, work: str, step: int, micro_batch: int = 0) -> Iterator[None]:
        with timed(self, work, step, micro_batch):
            start_s, used_s = time.perf_counter(), time.thread_time()
            yield
            if share_file.exists():
                due_s = (time.thread_time() - used_s) / float(share_file.read_text())
                time.sleep(max(due_s - (time.perf_counter() - start_s), 0.0))

    Recorder.record = paid  # type: ignore[method-assign]


def _version_1(mounts: Path = Path("/proc/mounts")) -> Path | None:
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(place)
    return None


def _version_2() -> Path | None:
    root = Path("/sys/fs/cgroup")
    return root if (root / "cgroup.controllers").exists() else None


def _groups(root: Path, shares: Mapping[int, float]) -> list[Path] | None:
    """A group for each process; None, and nothing changed, where the kernel refuses."""
    made: list[Path] = []
    _sweep(root)
    try:
        for pid, share in shares.items():
            group = root / f"{_NAME}-{os.getpid()}-{pid}"
            group.mkdir()
            made.append(group)
            _set_quota(group, share)
            (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        _undo(root, made)
        return None
    return made


def _set_quota(group: Path, share: float) -> None:
    period_s = min(QUOTA_S / share, LONGEST_PERIOD_S)
    period, quota = round(_MICRO * period_s), round(_MICRO * max(share * period_s, QUOTA_S))
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(period))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (group / "cpu.max").write_text(f"{quota} {period}")


def _sweep(root: Path) -> None:
    """Remove what a bench that was killed has left."""
    for group in root.glob(f"{_NAME}-*-*"):
        if not Path("/proc", group.name.split("-")[1]).exists():
            with suppress(OSError):  # somebody is still in it
                group.rmdir()


def _undo(root: Path, groups: list[Path]) -> None:
    for group in groups:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has just ended
                (root / "cgroup.procs").write_text(pid)
        with suppress(OSError):  # a zombie still counts as a member
            group.rmdir()


@contextmanager
def _duty_cycle(shares: Mapping[int, float]) -> Iterator[None]:
    with run_beside(partial(_drive, dict(shares)), "brake"):
        yield


def _drive(shares: dict[int, float], over: threading.Event) -> None:
    """Until ``over``; nobody is left stopped."""
    reins = {pid: _Rein(pid, share) for pid, share in shares.items()}
    while not over.wait(LOOK_S):
        for pid, rein in list(reins.items()):
            if not rein.look():
                del reins[pid]
    for rein in reins.values():
        rein.let_go()


class _Rein:
    """One process: stopped while it has used more than its share."""

    def __init__(self, pid: int, share: float) -> None:
        self._pid, self._share = pid, share
        self._stopped = False
        self._left_s, self._seen_s = 0.0, time.monotonic()
        self._used_s = 0.0
        with suppress(OSError):  # the next look will tell
            self._used_s = self._cpu_s()

    def look(self) -> bool:
        """Stop it or let it go on; whether it still lives. What it leaves unused is lost."""
        try:
            now_s, used_s = time.monotonic(), self._cpu_s()
            earned_s = self._share * (now_s - self._seen_s)
            self._left_s = min(self._left_s + earned_s - (used_s - self._used_s), QUOTA_S)
            self._seen_s, self._used_s = now_s, used_s
            if (self._left_s < 0) != self._stopped:
                os.kill(self._pid, signal.SIGCONT if self._stopped else signal.SIGSTOP)
                self._stopped = not self._stopped
        except OSError:
            return False
        return True

    def let_go(self) -> None:
        """Go on without a limit."""
        with suppress(OSError):
            os.kill(self._pid, signal.SIGCONT)

    def _cpu_s(self) -> float:
        return time.clock_gettime((~self._pid << 3) | _CPU_CLOCK)
