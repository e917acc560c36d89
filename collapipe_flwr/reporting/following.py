"""A run shown while it goes on, from what it writes into its directory.

The ServerApp is a process of another's, with no terminal. So whoever started the run reads the
directory, and the lines are laid out for the terminal that is there.
"""

from __future__ import annotations

import time
from pathlib import Path

from collapipe_flwr.reporting.event_tail import EventTail
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.progress import RunProgress, read_progress
from collapipe_flwr.reporting.run_directory import (
    LOG,
    newest_checkpoint,
    read_summary,
    summary_stamp,
)
from collapipe_flwr.reporting.screen import Screen

_ENDING = "stopping Flower"


class Follower:
    """Shows each new note and round of one attempt at a run, exactly once.

    Rounds up to the newest checkpoint that was there before are those of earlier attempts. On a
    verbose screen the log is passed on instead, which has these lines as well.
    """

    def __init__(self, run_dir: Path, screen: Screen) -> None:
        self._run_dir = run_dir
        self._screen, self._printer = screen, screen.printer
        self._began_s = time.time()  # what an earlier attempt left says nothing
        self._last = newest_checkpoint(run_dir)
        self._stamp = summary_stamp(run_dir)
        self._events = EventTail(run_dir)
        self._notes = set((read_summary(run_dir) or {}).get("notes", ()))  # of earlier attempts
        self._untrained = bool(self._last)  # resumed: it was said before
        self._shown: RunProgress | None = None
        log = run_dir / LOG
        self._log_place = log.stat().st_size if log.exists() else 0

    def look(self) -> None:
        """Show what is new."""
        if self._screen.verbose:
            self._pass_on()
            return
        self._look_for_rounds()
        progress = read_progress(self._run_dir)
        if progress is not None and progress.since_s >= self._began_s:
            self._shown = progress
        elif self._shown is not None and self._shown.phase != _ENDING:
            # The ServerApp takes its file away as the last it does; what runs on is Flower.
            self._shown = RunProgress(phase=_ENDING, since_s=time.time())
        if self._shown is not None:
            self._screen.show(self._shown)

    def _look_for_rounds(self) -> None:
        stamp = summary_stamp(self._run_dir)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        summary = read_summary(self._run_dir) or {}
        self._printer.rounds = summary.get("rounds_asked")
        for note in summary.get("notes", ()):
            if note not in self._notes:
                self._notes.add(note)
                self._printer.say(note)
        if summary.get("untrained") and not self._untrained:
            self._untrained = True
            self._printer.show_untrained(summary["untrained"])
        for event in self._events.new():
            if event["round_index"] > self._last:
                self._last = event["round_index"]
                self._printer.show(RoundEvent.of_json(event))

    def _pass_on(self) -> None:
        log = self._run_dir / LOG
        if not log.exists():
            return
        with log.open("rb") as file:
            file.seek(self._log_place)
            new = file.read()
        self._log_place += len(new)
        self._screen.pass_on(new.decode(errors="replace"))
