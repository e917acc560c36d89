"""Processes that end with the one that started them, however that one ends.

The parent holds a pipe open, and the child has the other end as its stdin. The kernel closes the
pipe with the parent, also on SIGKILL, and the child ends itself as by SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def lifeline() -> Iterator[int]:
    """The stdin of a child, for a parent that needs no pipe of `subprocess` to it."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with_parent(take: Callable[[str], object] | None = None) -> None:
    """Raise SIGTERM here when stdin ends, whatever this process is doing then.

    ``take`` is called, in a thread, with every line until then. An interrupt from the terminal is
    left to the parent; whoever handles SIGINT himself does so after this call.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_read, args=(take,), daemon=True, name="lifeline").start()


def _read(take: Callable[[str], object] | None) -> None:
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # unbuffered: a lock of sys.stdin's
        for line in stdin:  # own would be held when the process ends in order
            if take is not None:
                take(line.decode())
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)
