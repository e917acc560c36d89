"""Reads the rounds of a run while another process writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from collapipe_flwr.reporting.run_directory import EVENTS, parse_event

_MARK_BYTES = 256  # before the place: where they differ, the file is not the one that was read
_BLOCK_BYTES = 1 << 20


class EventTail:
    """Reads each line of ``events.jsonl`` once, and a file that took its place from its start.

    A last line without its newline is left until it is complete. ``generation`` counts the files:
    with a new one, rounds may come again that were read before.
    """

    def __init__(self, run_dir: Path) -> None:
        self.generation = 0
        self._path = run_dir / EVENTS
        self._inode = 0
        self._place, self._number, self._mark = 0, 0, b""

    @property
    def read_bytes(self) -> int:
        """How much of the file was read."""
        return self._place

    def new(self, about_bytes: int = -1) -> list[dict[str, Any]]:
        """The rounds that were written since the last call, oldest first.

        With ``about_bytes``, only so much and to the end of the line; -1: all there is. Raises
        RunError for a damaged line.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            if not self._continues(file):
                self.generation += 1
                self._place, self._number, self._mark = 0, 0, b""
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._place)
            lines = file.readlines(about_bytes)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        events = []
        for line in lines:
            self._place += len(line)
            self._mark = (self._mark + line)[-_MARK_BYTES:]
            self._number += 1
            events.append(parse_event(self._path, self._number, line))
        return events

    def _continues(self, file: BinaryIO) -> bool:
        """Whether what was read is still there: an inode may be given to another file."""
        if self._inode and os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._place - len(self._mark))
        return file.read(len(self._mark)) == self._mark


def newest_event(run_dir: Path) -> dict[str, Any] | None:
    """The last complete line of ``events.jsonl``, however long the file is; None without any."""
    path = run_dir / EVENTS
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        place, found = file.seek(0, os.SEEK_END), b""
        while place and found.count(b"\n") < 2:
            step = min(place, _BLOCK_BYTES)
            place -= step
            file.seek(place)
            found = file.read(step) + found
    complete = found.rpartition(b"\n")[0]
    line = complete.rpartition(b"\n")[2]
    return parse_event(path, 0, line) if line else None
