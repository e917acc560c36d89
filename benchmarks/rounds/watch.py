"""CPU and memory of a control unit's processes: SuperNode, ClientApps, what stays beside them."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Self

_PROC = Path("/proc")
_LOOK_S = 0.1
_STOP_S = 10.0
_APPS = (b"flwr-clientapp", b"client_process.py")  # by itself where nothing forks
_READY = b"client_process.py\0--forks-at"
_UNIT = b"control-unit\0--socket"


@dataclass(slots=True)
class Process:
    """What was last seen of one."""

    cpu_s: float = 0.0
    peak_bytes: int = 0


@dataclass(slots=True)
class Watch:
    """Looks at all that descends from ``roots`` every 0.1 s; what is shorter it may miss.

    ``apps`` are ClientApps' processes, ``forks`` those that work for them in the order of their
    beginning, made by ``ready``.
    ``cpu_s`` are pairs of a time by the clock and the CPU seconds until then, all together.
    """

    roots: tuple[int, ...]
    apps: dict[int, Process] = field(default_factory=dict)
    forks: dict[int, Process] = field(default_factory=dict)
    unit: Process = field(default_factory=Process)
    ready: Process = field(default_factory=Process)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    _all: dict[int, Process] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        assert self._thread is not None
        self._thread.join(_STOP_S)

    def cpu_between(self, begin_s: float, end_s: float) -> float:
        """CPU seconds between two times by the clock."""
        within = [cpu_s for at_s, cpu_s in self.cpu_s if begin_s <= at_s <= end_s]
        return within[-1] - within[0] if within else 0.0

    def messages(self, count: int) -> list[Process]:
        """The last ``count`` messages, one a round: program and fork together."""
        kinds = ([seen[pid] for pid in sorted(seen)[-count:]] for seen in (self.apps, self.forks))
        return [
            Process(app.cpu_s + fork.cpu_s, app.peak_bytes + fork.peak_bytes)
            for app, fork in zip_longest(*kinds, fillvalue=Process())
        ]

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            for pid in _tree(self.roots):
                self._see(pid)
            self.cpu_s.append((time.time(), sum(each.cpu_s for each in self._all.values())))

    def _see(self, pid: int) -> None:
        try:
            command = _command(pid)
            seen = Process(_cpu_s(pid), _peak_bytes(pid))
            generation = _generation(pid)
        except (OSError, ValueError, IndexError):  # it has ended
            return
        self._all[pid] = seen
        if generation == 2:
            self.forks[pid] = seen
        elif generation == 1:
            self.ready.peak_bytes = max(self.ready.peak_bytes, seen.peak_bytes)
        elif not generation and any(name in command for name in _APPS):
            self.apps[pid] = seen
        elif _UNIT in command and b"core.processes" not in command:
            self.unit.peak_bytes = max(self.unit.peak_bytes, seen.peak_bytes)


def _generation(pid: int) -> int:
    """1 for the process that forks, 2 for its forks, more for what they start, until it is named.

    A process bears its parent's command line until it has its own. 0 for all others.
    """
    generation = 0
    while _READY in _command(pid):
        generation, pid = generation + 1, _parent(pid)
    return generation


def _command(pid: int) -> bytes:
    return (_PROC / str(pid) / "cmdline").read_bytes()


def _parent(pid: int) -> int:
    return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])


def _cpu_s(pid: int) -> float:
    fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak_bytes(pid: int) -> int:
    lines = (_PROC / str(pid) / "status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(kilobytes) * 1024


def _tree(roots: tuple[int, ...]) -> set[int]:
    parents: dict[int, int] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            parents[int(folder.name)] = _parent(int(folder.name))
        except OSError:
            continue
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
