"""What runs in this process, for tests of what ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_DEADLINE_S = 60.0  # a thread that was told to end may need a moment


@contextmanager
def none_left() -> Iterator[None]:
    """Threads that the body starts end with it; AssertionError names those that do not."""
    before = set(threading.enumerate())
    yield
    until_s = time.monotonic() + _DEADLINE_S
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not left
