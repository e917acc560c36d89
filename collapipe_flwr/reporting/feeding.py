"""A sink is fed by a thread of its own, so that no tool can slow or end a run."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from collapipe_flwr.reporting.scalars import Scalar
from collapipe_flwr.reporting.sinks import Sink


@dataclass(frozen=True, slots=True)
class _Round:
    step: int
    values: Sequence[Scalar]


@dataclass(frozen=True, slots=True)
class _End:
    status: str
    artefacts: Sequence[Path]


class Feeder:
    """Hands rounds to one sink in their order; what fails is tried again with the next round.

    ``open_`` gets the first round that the sink is to hold.
    """

    def __init__(self, name: str, open_: Callable[[int], Sink]) -> None:
        self._name, self._open = name, open_
        self._sink: Sink | None = None
        self._problem, self._told = "", False
        self._waiting: deque[_Round] = deque()
        self._inbox: queue.SimpleQueue[_Round | _End] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        """Hand over a round; returns at once."""
        self._inbox.put(_Round(step, values))

    def end(self, status: str, artefacts: Sequence[Path]) -> None:
        """Hand over the end of the run."""
        self._inbox.put(_End(status, artefacts))

    def wait(self, within_s: float) -> None:
        """After the end, wait so long for the sink to have everything."""
        self._thread.join(within_s)
        if self._thread.is_alive():
            self._blame("it took too long")

    def take_problem(self) -> str:
        """The first failure, once: a sentence for whoever watches the run; empty if none is new."""
        if self._told or not self._problem:
            return ""
        self._told = True
        return self._problem

    def _feed(self) -> None:
        while True:
            item = self._inbox.get()
            # Tools of others raise what they like, and the run is worth more than what they show.
            try:
                self._take(item)
            except Exception as error:
                self._sink = None
                self._blame(f"{type(error).__name__}: {error}")
            if isinstance(item, _End):
                return

    def _take(self, item: _Round | _End) -> None:
        if isinstance(item, _Round):
            self._waiting.append(item)
        while self._waiting:
            first = self._waiting[0]
            self._sink = self._sink or self._open(first.step)
            self._sink.write(first.step, first.values)
            self._waiting.popleft()
        if isinstance(item, _End) and self._sink is not None:
            self._sink.close(item.status, item.artefacts)

    def _blame(self, why: str) -> None:
        words = f"{self._name} misses rounds ({why.strip().splitlines()[0]}); they are tried again"
        self._problem = self._problem or f"reporting.sinks: {words}"
