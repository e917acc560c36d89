"""A generator that rebuilds its chain from the remaining devices when it breaks.

A text whose chain broke is generated again from its prompt; tokens that were yielded before are not
yielded twice. Greedy decoding, beams and seeded sampling are deterministic, so the text is that of
an unbroken chain.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from collapipe_flwr.core.errors import CollaPipeError, LinkError
from collapipe_flwr.pipeline.generation_driver import GenerationDriver, TextTimeout

_log = logging.getLogger(__name__)
MOST_REPLAYS = 2  # of one text without a new token; a further failure is not transient


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationBackend:
    """Devices, in the order of the chain, and an edge on which chains can be built.

    ``chain`` makes a new one over some devices and raises LinkError if one does not answer;
    ``missing`` are those that do not answer now.
    """

    device_ids: tuple[str, ...]
    chain: Callable[[Sequence[str]], AbstractContextManager[GenerationDriver]]
    missing: Callable[[Collection[str]], frozenset[str]]


@dataclass(slots=True, kw_only=True)
class _RunningChain:
    """A running chain, and the stack that takes it down."""

    driver: GenerationDriver
    stack: ExitStack


class ResilientGenerator:
    """A generator over the devices of ``backend`` that answer; use as a context manager.

    ``generate`` may be called from several threads at once.
    """

    def __init__(self, backend: GenerationBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._running: _RunningChain | None = None
        self._lost: frozenset[str] = frozenset()  # at the last look
        self._over = False

    def __enter__(self) -> Self:
        """Build the first chain; raises LinkError when none can be built."""
        self._ensure_running()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            built, self._running, self._over = self._running, None, True
        if built is not None:
            built.stack.__exit__(*error)

    def generate(self, prompt: Tensor, settings_json: str) -> Generator[Tensor]:
        """Yield the new tokens of a text; see `GenerationDriver.generate`.

        Raises LinkError when the chain cannot be rebuilt, or breaks three times without a new token
        of this text; the first loss of each device does not count.
        """
        told, replays, lost = 0, 0, frozenset[str]()
        while True:
            built = self._ensure_running()
            before, skipped = told, 0
            try:
                with closing(built.driver.generate(prompt, settings_json)) as pieces:
                    for new in pieces:
                        fresh = new[max(told - skipped, 0) :]  # a replay begins with old ones
                        skipped += len(new)
                        if len(fresh):
                            told += len(fresh)
                            yield fresh
                return
            except TextTimeout:
                raise
            except LinkError as error:
                away = self._take_down(built, error)
                if told > before:
                    replays = 0
                replays = 0 if away - lost else replays + 1
                lost |= away
                if replays > MOST_REPLAYS:
                    raise

    def _ensure_running(self) -> _RunningChain:
        """Return the running chain; build one where there is none."""
        with self._lock:
            if self._over:
                raise LinkError("the chain was taken down: it generates no more")
            if self._running is None:
                self._running = self._build()
            return self._running

    def _build(self) -> _RunningChain:
        """Build a chain over the devices that answer; try again while more are found missing."""
        lost = self._lost
        while True:
            present = [name for name in self._backend.device_ids if name not in self._lost]
            stack = ExitStack()
            try:
                driver = stack.enter_context(self._backend.chain(present))
            except LinkError as error:
                if not self._find_missing(error) - lost:
                    raise
                lost |= self._lost
            else:
                return _RunningChain(driver=driver, stack=stack)

    def _take_down(self, broken: _RunningChain, error: LinkError) -> frozenset[str]:
        """Take a broken chain down, once; returns the devices that do not answer."""
        with self._lock:
            if self._running is broken:
                self._running = None
                try:
                    broken.stack.__exit__(type(error), error, error.__traceback__)
                except CollaPipeError as again:
                    _log.info("while a broken chain was taken down: %s", again)
                self._find_missing(error)
            return self._lost

    def _find_missing(self, error: LinkError) -> frozenset[str]:
        """Return the devices that do not answer now; raises LinkError if none answers."""
        before, self._lost = self._lost, self._backend.missing(self._backend.device_ids)
        if len(self._lost) == len(self._backend.device_ids):
            self._lost = frozenset()
            raise LinkError(f"no device of the cluster answers any more: {error}") from error
        if more := self._lost - before:
            _log.warning("lost %s: %s", ", ".join(sorted(more)), error)
        return self._lost
