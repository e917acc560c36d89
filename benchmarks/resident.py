"""The memory of a process as the kernel counts it; Linux only.

`getrusage` will not do: its peak includes what the parent held when it started the process. Pages
of files (a checkpoint that is mapped, libraries) count as resident too, though the kernel takes
them back whenever it wants; so what is anonymous is told apart.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Self

_LOOK_S = 0.02
_STOP_S = 10.0


def peak_bytes(pid: int | str = "self") -> int:
    """Largest resident size of a process so far, pages of files included."""
    return _status("VmHWM", pid)


def resident_bytes(pid: int | str = "self") -> int:
    """Resident size of a process now, pages of files included."""
    return _status("VmRSS", pid)


def file_bytes(pid: int | str = "self") -> int:
    """Resident pages of files now, such as libraries."""
    return _status("RssFile", pid)


def forget_peak(pid: int | str = "self") -> None:
    """Let the largest resident size be the present one: proc_pid_clear_refs(5)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


class AnonymousPeak:
    """Looks at the anonymous part every 20 ms; what is shorter than that it may miss."""

    def __init__(self) -> None:
        self.bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_STOP_S)

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.bytes = max(self.bytes, _status("RssAnon"))
        self.bytes = max(self.bytes, _status("RssAnon"))


def _status(name: str, pid: int | str = "self") -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(kilobytes) * 1024
