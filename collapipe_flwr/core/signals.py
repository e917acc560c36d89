"""SIGTERM and SIGINT as an event, or as an exception that undoes what was begun.

Both replace what a shell sets for a job in the background, where SIGINT is ignored and Python
installs no handler for it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNS = (signal.SIGTERM, signal.SIGINT)
_Handler = Callable[[int, FrameType | None], object]


@contextmanager
def stopping() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set while the body runs."""
    stop = threading.Event()
    with _handled(lambda *_: stop.set()):
        yield stop


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGINT leave the body by SystemExit, so that it stops what it has started.

    What stops it has deadlines of its own; more signals do not disturb it.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        del frame
        for sign in _SIGNS:
            signal.signal(sign, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    with _handled(leave):
        yield


@contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    before = {sign: signal.signal(sign, handler) for sign in _SIGNS}
    try:
        yield
    finally:
        for sign, previous in before.items():
            signal.signal(sign, previous)
