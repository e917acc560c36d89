"""What processes and folders of a deployment hold: memory, descriptors, threads, disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_WORDS = 5  # of a command, among which its program is named
_PROGRAMS = {
    "device": "device",
    "edge": "edge",
    "control-unit": "control unit",
    "flower-superlink": "SuperLink",
    "supernode": "SuperNode",
    "flower-superexec": "SuperExec",
    "flwr-serverapp": "ServerApp",
    "flwr-clientapp": "ClientApp",
    "client_process.py": "what forks ClientApps",
}
_FORKS = {"what forks ClientApps": "ClientApp"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A process since it executed its program."""

    host: str
    role: str
    pid: int
    began: tuple[str, str]  # the kernel's ticks, and its stack, whose place is new per program


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process holds at one time.

    Its memory is that which belongs to no file: pages of programs and libraries come with the first
    use of a function, megabytes at a time, and the kernel drops them when memory is short.
    """

    at_s: float
    memory_bytes: int
    descriptors: int
    threads: int


def usages(hosts: Mapping[int, str], at_s: float) -> dict[Life, Usage]:
    """Of all processes of these hosts that run a program of a deployment."""
    found = {}
    for pid, host in hosts.items():
        with suppress(OSError):  # it has ended
            if role := _role(pid):
                stat = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                if role in _FORKS and _role(int(stat[1])) == role:
                    role = _FORKS[role]
                life = Life(host=host, role=role, pid=pid, began=(stat[19], stat[25]))
                found[life] = _usage(pid, at_s)
    return found


def _role(pid: int) -> str:
    words = (_PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")[:_WORDS]
    return next((_PROGRAMS[name] for word in words if (name := Path(word).name) in _PROGRAMS), "")


def _usage(pid: int, at_s: float) -> Usage:
    folder = _PROC / str(pid)
    lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    if "RssAnon" not in lines:
        raise ProcessLookupError(pid)  # a zombie
    own_kb = sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return Usage(
        at_s=at_s,
        memory_bytes=own_kb * 1024,
        descriptors=len(os.listdir(folder / "fd")),
        threads=int(lines["Threads"]),
    )


def disk_bytes(path: Path) -> int:
    """What a file or folder takes; what goes while it is looked at does not count."""
    total = _blocks_bytes(path)
    for folder, folders, files in os.walk(path):
        total += sum(_blocks_bytes(Path(folder) / name) for name in (*folders, *files))
    return total


def _blocks_bytes(path: Path) -> int:
    with suppress(OSError):  # it is gone
        return path.lstat().st_blocks * 512
    return 0
