"""The current progress of a run: `progress.json` in its directory.

The ServerApp writes it: it knows the phases, and asks the edge, where every step of every cluster
ends, in simulation as in a deployment. The file is replaced as a whole but not flushed to disk, and
removed when the run ends.
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
from collapipe_flwr.core.processes import run_beside

PROGRESS = "progress.json"
LOOK_S = 0.5  # between two looks at how far the clusters are
_SHARE = 0.005  # of a processor, at most, goes into looking, and as much into answering


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProgress:
    """Micro-batches of ``examples`` that a cluster has finished, out of ``of`` (0: unknown).

    ``per_step`` of them are an optimizer step; ``tested`` ones were only evaluated. The plan
    predicted ``predicted_s`` seconds for the round, simulated ones if devices are simulated.
    """

    trained: int = 0
    tested: int = 0
    of: int = 0
    per_step: int = 1
    examples: int = 0
    predicted_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """The ``phase`` of a run, its begin, and the progress of its clusters at ``at_s`` (Unix times).

    ``round_index`` is 0 outside of training rounds. ``simulated``: predicted seconds are simulated.
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
    """Keeps `progress.json` of one run up to date, in a ``folder`` that may not exist yet.

    While :meth:`watch`, a thread polls the clusters, rarely enough to take half a percent of a
    processor. ``say`` is called once with each phase outside of rounds.
    """

    def __init__(
        self, folder: Path | None, *, rounds: int = 0, say: Callable[[str], None] | None = None
    ) -> None:
        self.folder = folder
        self.simulated = True  # predicted seconds are
        self._say = say
        self._lock = threading.Lock()
        self._look: Look = dict
        self._now = RunProgress(phase="", since_s=time.time(), rounds=rounds)

    def enter(self, phase: str, *, round_index: int = 0, look: Look | None = None) -> None:
        """Begin a phase, in which ``look`` returns the progress of the clusters."""
        now_s = time.time()
        with self._lock:
            self._look = look or dict
            begun = replace(self._now, phase=phase, since_s=now_s, at_s=now_s, clusters={})
            self._now = replace(begun, round_index=round_index, simulated=self.simulated)
            self._write()
        if self._say is not None and not round_index:
            self._say(phase)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Poll while the body runs, then remove the file."""
        try:
            with run_beside(self._poll, "progress"):
                yield
        finally:
            if self.folder is not None:
                with suppress(OSError):
                    (self.folder / PROGRESS).unlink(missing_ok=True)

    def _poll(self, over: threading.Event) -> None:
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
        """Replace the file; a full disk does not stop the run."""
        if self.folder is not None and self.folder.is_dir():
            with suppress(OSError):
                draft = self.folder / f"{PROGRESS}.partial"
                draft.write_text(to_json(self._now), encoding="utf-8")
                os.replace(draft, self.folder / PROGRESS)


def read_progress(folder: Path) -> RunProgress | None:
    """Read the progress of a run; None without a valid file."""
    try:
        return from_json(RunProgress, (folder / PROGRESS).read_text(encoding="utf-8"), PROGRESS)
    except (OSError, ProtocolError):  # none, or what a power cut left of it
        return None
