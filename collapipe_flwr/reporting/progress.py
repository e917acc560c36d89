"""Where a run is just now: `progress.json` in its directory, for whoever watches it.

The ServerApp writes it, because it alone knows the phases, and what it asks of the edge: every
step of every cluster ends there, in simulation as in a deployment. It is of use only while the run
goes on, so it is replaced as a whole but not flushed to disk, and gone when the run ends.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json

PROGRESS = "progress.json"
LOOK_S = 0.5  # between two looks at how far the clusters are
_SHARE = 0.005  # of a processor, at most, goes into looking, and as much into answering


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProgress:
    """Micro-batches of ``examples`` that a cluster has behind it, ``of`` so many (0: not known).

    ``per_step`` of them are an optimizer step. ``tested`` ones were not trained on. The plan
    predicted ``predicted_s`` seconds for the round, which are simulated ones where devices are.
    """

    trained: int = 0
    tested: int = 0
    of: int = 0
    per_step: int = 1
    examples: int = 0
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The ``phase`` of a run, since when, and how far its clusters are at ``at_s`` (Unix times).

    ``round_index`` is 0 outside of training rounds. ``simulated`` says that predicted seconds are.
    """

    phase: str
    since_s: float
    at_s: float = 0.0
    round_index: int = 0
    rounds: int = 0
    simulated: bool = True
    clusters: Mapping[str, ClusterProgress] = field(default_factory=dict)


Look = Callable[[], Mapping[str, ClusterProgress]]


class ProgressFile:
    """Keeps `progress.json` of one run up to date, in a ``folder`` that may come to be later.

    A thread looks at how far clusters are while :meth:`watching`, so rarely that it takes half a
    percent of a processor. ``say`` hears the phases outside of rounds, each once.
    """

    def __init__(
        self, folder: Path | None, *, rounds: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        self.folder = folder
        self.simulated = True  # predicted seconds are
        self._rounds = rounds
        self._say = say
        self._lock = threading.Lock()
        self._look: Look = dict
        self._now = RunProgress(phase="", since_s=time.time())

    def enter(self, phase: str, *, round_index: int = 0, look: Look | None = None) -> None:
        """A phase begins, in which ``look`` says how far the clusters are."""
        now_s = time.time()
        with self._lock:
            self._look = look or dict
            self._now = RunProgress(
                phase=phase,
                since_s=now_s,
                at_s=now_s,
                round_index=round_index,
                rounds=self._rounds,
                simulated=self.simulated,
            )
            self._write()
        if self._say is not None and not round_index:
            self._say(phase)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look again and again while the body runs; the file is gone afterwards."""
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(over,), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            if self.folder is not None:
                with suppress(OSError):
                    (self.folder / PROGRESS).unlink(missing_ok=True)

    def _watch(self, over: threading.Event) -> None:
        pause_s = LOOK_S
        while not over.wait(pause_s):
            start_s = time.thread_time()
            with self._lock:
                phase, look = self._now, self._look
            found = look()
            with self._lock:
                if found and self._now.since_s == phase.since_s:
                    self._now = replace(phase, clusters=found, at_s=time.time())
                    self._write()
            pause_s = max(LOOK_S, (time.thread_time() - start_s) / _SHARE)

    def _write(self) -> None:
        """Replace the file; a disk that is full is no reason to stop."""
        if self.folder is not None and self.folder.is_dir():
            with suppress(OSError):
                draft = self.folder / f"{PROGRESS}.partial"
                draft.write_text(to_json(self._now), encoding="utf-8")
                os.replace(draft, self.folder / PROGRESS)


def read_progress(folder: Path) -> RunProgress | None:
    """Where a run is; None where nobody says it."""
    try:
        return from_json(RunProgress, (folder / PROGRESS).read_text(encoding="utf-8"), PROGRESS)
    except (OSError, ProtocolError):  # none, or what a power cut left of it
        return None
