"""A sink is fed by a thread of its own, so that no tool can slow or end a run."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from collapipe_flwr.reporting.scalars import Scalar
from collapipe_flwr.reporting.sinks import Sink


class Feeder:
    """Hands rounds to one sink in their order; what fails is tried again with the next round.

    ``open_`` gets the first round that the sink is to hold.
    """

    def __init__(self, name: str, open_: Callable[[int], Sink]) -> None:
        self._name, self._open = name, open_
        self._sink: Sink | None = None
        self._problem, self._told = "", False
        self._waiting: deque[tuple[int, Sequence[Scalar]]] = deque()
        self._end: tuple[str, Sequence[Path]] = ("", ())
        # Rounds; None says that the run has ended.
        self._inbox: queue.SimpleQueue[tuple[int, Sequence[Scalar]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._feed, name=f"sink-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        """Hand over a round; returns at once."""
        self._inbox.put((step, values))

    def end(self, status: str, artefacts: Sequence[Path]) -> None:
        """Hand over the end of the run."""
        self._end = status, artefacts
        self._inbox.put(None)

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
            if item is None:
                return

    def _take(self, item: tuple[int, Sequence[Scalar]] | None) -> None:
        if item is not None:
            self._waiting.append(item)
        while self._waiting:
            step, values = self._waiting[0]
            self._sink = self._sink or self._open(step)
            self._sink.write(step, values)
            self._waiting.popleft()
        if item is None and self._sink is not None:
            self._sink.close(*self._end)

    def _blame(self, why: str) -> None:
        words = f"{self._name} misses rounds ({why.strip().splitlines()[0]}); they are tried again"
        self._problem = self._problem or f"reporting.sinks: {words}"
