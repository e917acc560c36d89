"""Follows a run in a thread and notifies pages of changes.

What a page lacks is computed when it asks, so a slow page gets more at a time. The report is made
again when it is requested after new rounds, once for all pages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.reporting.live.state import Place, RunState
from collapipe_flwr.reporting.report.overview import tiles
from collapipe_flwr.reporting.report.page import require_report, run_sections, section_html
from collapipe_flwr.reporting.run_data import RunData
from collapipe_flwr.reporting.run_directory import BY_OWNER
from collapipe_flwr.reporting.run_lock import CONFIG, LOG
from collapipe_flwr.reporting.run_reader import RunReader

_LOOK_S = 0.2
Find = Callable[[], Path | None]


class Feed:
    """The run that ``find`` returns, which may not exist yet and may change."""

    def __init__(self, find: Find) -> None:
        self.figures = Figures()
        self._find = find
        self._reader: RunReader | None = None
        self._state = RunState()
        self._changed = threading.Condition()
        self._over = False

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Follow the run while the body runs; afterwards pages are told that it is over."""
        try:
            with run_beside(self._poll, "watch"):
                yield
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def next(self, known: Place, timeout_s: float) -> tuple[Place, str] | None:
        """Return what a page at ``known`` lacks, as JSON, and the place that this leads to.

        None if nothing is new within the time; raises EOFError when the run is no longer followed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._state.place != known, timeout_s)
            if self._over:
                raise EOFError
            place = self._state.place
            news = None if place == known else self._state.since(known)
        return None if news is None else (place, json.dumps(news, separators=(",", ":")))

    def look(self) -> bool:
        """Read what is new, or a part of it if it is much; returns whether rounds were read."""
        run_dir = self._find()
        if run_dir is None:
            return False
        if self._reader is None or self._reader.run_dir != run_dir:
            self._reader = RunReader(run_dir)
        reader = self._reader
        reader.look()
        with self._changed:
            before = self._state.place
            if reader.anew:
                self._state.begin()
            self._state.set_head(reader.head, reader.summary.get("energy", {}).get("budget_j", {}))
            if reader.newest is not None:
                self._state.show(reader.newest)
            self._state.add(reader.events)
            if self._state.place != before:
                self._changed.notify_all()
        self.figures.take(reader)
        return bool(reader.events)

    def _poll(self, over: threading.Event) -> None:
        while not over.is_set():
            if not self.look():
                over.wait(_LOOK_S)


def run_finder(run: Path | None, output_dir: Path) -> Find:
    """Return a function that names the run to show; raises ConfigError where none can be there."""
    if run is None:
        _check_folder(output_dir, "--output-dir")
        return lambda: newest_run(output_dir)
    _check_folder(run, "RUN")
    if run.is_dir() and _began_s(run) is None and any(run.iterdir()):
        raise ConfigError(
            f"{run} is not the folder of a run: name one that `collapipe run` printed, or give "
            f"--output-dir {run} for the newest run in it"
        )
    _check_folder(run.parent, "RUN")
    if not run.parent.is_dir():
        raise ConfigError(f"{run}: there is no folder {run.parent} in which it could come to be")
    return lambda: run


def newest_run(folder: Path) -> Path | None:
    """Return the run directory that began last; None while there is none."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = [(began_s, path) for path in paths if (began_s := _began_s(path))]
    return max(found)[1] if found else None


def _began_s(run: Path) -> float | None:
    """Return when the run-config, or the log before it, was written; None for no run."""
    for name in (CONFIG, LOG):
        with suppress(OSError):  # not there, or not for this user
            return (run / name).stat().st_mtime
    return None


def _check_folder(path: Path, what: str) -> None:
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{what} {path} is a file: name a folder")
        if path.is_dir():
            next(path.iterdir(), None)
    except PermissionError as error:
        raise ConfigError(f"{what} {path}: its files are not for this user; {BY_OWNER}") from error


class Figures:
    """The sections of the report, made from the rounds so far."""

    def __init__(self) -> None:
        self._data = RunData("")
        self._run_dir: Path | None = None  # where timelines are
        self._lock = threading.Lock()
        self._changed = True
        self._text = "{}"

    def take(self, found: RunReader) -> None:
        """Add rounds and replace the summary."""
        with self._lock:
            if found.anew:
                self._data, self._run_dir = RunData(found.head["name"]), found.run_dir
            told = {**found.summary, **{key: found.head[key] for key in ("status", "reason")}}
            if found.anew or found.events or told != self._data.summary:
                self._data.summary, self._data.config = told, found.head["config"]
                for event in found.events:
                    self._data.add(event)
                self._changed = True

    def text(self) -> str:
        """Return tiles and sections as JSON, or the reason why there are none."""
        with self._lock:
            if self._changed:
                self._text = json.dumps(self._render(), separators=(",", ":"), allow_nan=False)
                self._changed = False
            return self._text

    def _render(self) -> dict[str, Any]:
        if not self._data.rounds:
            return {"sections": []}
        try:
            require_report()
            sections = [
                {
                    "key": section.key,
                    "title": section.title,
                    "html": section_html(section),
                    "charts": section.figures,
                }
                for section in run_sections(self._data, self._run_dir)
            ]
        except (ConfigError, RunError) as error:
            return {"sections": [], "missing": str(error)}
        told = ("Run", self._data.metric)  # at the head of the page already
        found = [
            [t.title, t.value, t.note, t.warning] for t in tiles(self._data) if t.title not in told
        ]
        return {"sections": sections, "tiles": found}
