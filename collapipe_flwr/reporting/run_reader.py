"""Reads the directory of a run while another process writes it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.reporting import run_directory
from collapipe_flwr.reporting.progress import read_progress
from collapipe_flwr.reporting.run_lock import RUNNING, STARTING, is_written, mark_interrupted

Json = dict[str, Any]
_MARK_BYTES = 256  # before the place: where they differ, the file is not the one that was read
_ABOUT_BYTES = 8 << 20  # of events that are read at once
_TOLD = ("status", "reason", "rounds_asked", "notes", "untrained", "wall_s")


class EventTail:
    """Reads each line of ``events.jsonl`` once, and a file that replaced it from its start.

    A last line is read when its newline is there. ``generation`` counts the files: a new one may
    repeat rounds that were read before. ``place`` is how many bytes of it were read.
    """

    def __init__(self, run_dir: Path) -> None:
        self.generation = 0
        self._path = run_dir / run_directory.EVENTS
        self._inode = 0
        self.place, self._number, self._mark = 0, 0, b""

    def read_new(self, about_bytes: int = -1) -> list[dict[str, Any]]:
        """Read the rounds written since the last call, oldest first, about ``about_bytes`` of them.

        -1: all. Raises RunError for a damaged line.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            if not self._is_same_file(file):
                self.generation += 1
                self.place, self._number, self._mark = 0, 0, b""
            self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self.place)
            lines = file.readlines(about_bytes)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        events = []
        for line in lines:
            self.place += len(line)
            self._mark = (self._mark + line)[-_MARK_BYTES:]
            self._number += 1
            events.append(run_directory.parse_event(self._path, self._number, line))
        return events

    def _is_same_file(self, file: BinaryIO) -> bool:
        """Return whether this is still the file that was read; an inode may be used again."""
        if self._inode and os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self.place - len(self._mark))
        return file.read(len(self._mark)) == self._mark


class RunReader:
    """Reads a run directory, which may not exist yet; :meth:`look` sets what it has found.

    ``summary`` is as it was written, ``head`` has short values of it. ``events`` are new rounds,
    of a new file if ``anew``; ``newest`` is the last round of a long file, of which much is still
    to be read.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.head: Json = {}
        self.summary: Json = {}
        self.events: list[Json] = []
        self.anew = False
        self.newest: Json | None = None
        self._tail = EventTail(run_dir)
        self._generation = -1
        self._size = 0  # of the events, when their end was looked at
        self._stamp: tuple[int, int] | None = None
        self._config: Json | None = None
        self._broken: str | None = None

    def look(self) -> None:
        """Read what is new; a damaged file sets ``broken`` of the head and ends the reading."""
        self.events, self.newest = [], None
        written = is_written(self.run_dir)
        try:
            if self._broken is None:
                if (stamp := run_directory.summary_stamp(self.run_dir)) != self._stamp:
                    self._stamp = stamp
                    self.summary = run_directory.read_written_summary(self.run_dir) or {}
                if self._config is None:
                    self._config = run_directory.read_config(self.run_dir)
                self.events = self._tail.read_new(_ABOUT_BYTES)
                self.newest = self._read_newest()
        except RunError as error:
            self._broken = str(error)
        self.anew = self._tail.generation != self._generation
        self._generation = self._tail.generation
        self.head = self._head(written)

    def _members(self) -> dict[str, list[str]]:
        """Return control unit and devices by cluster, which only plans say later."""
        members: dict[str, list[str]] = {}
        for name in self.summary.get("energy", {}).get("budget_j") or {}:
            cluster, _, device = name.rpartition("/")
            members.setdefault(cluster, []).append(device)
        return members

    def _read_newest(self) -> Json | None:
        """Read the last round if much is left to read before it and it has changed."""
        size = run_directory.events_bytes(self.run_dir)
        grown, self._size = size != self._size, size
        behind = size - self._tail.place > _ABOUT_BYTES
        return run_directory.newest_event(self.run_dir) if grown and behind else None

    def _head(self, written: bool | None) -> Json:
        """Return short values of the summary, or their defaults before there is one."""
        before = STARTING if self.run_dir.is_dir() else "waiting"
        summary = self.summary or {"status": before}
        told = mark_interrupted({key: summary.get(key) for key in _TOLD}, self.run_dir, written)
        running = told["status"] in (STARTING, RUNNING)
        return {
            **told,
            "name": self.run_dir.name,
            "metric": self.summary.get("metric", {}).get("name"),
            "broken": self._broken,
            "config": self._config or {},
            "members": {} if self._tail.place else self._members(),
            "changed_s": self._stamp[1] / 1e9 if self._stamp else None,
            "progress": to_plain(read_progress(self.run_dir)) if running else None,
        }
