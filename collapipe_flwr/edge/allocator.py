"""The C library's heap, set up for a process of few big tensors that come and go.

glibc gives every thread a heap of its own, and memory freed in one cannot serve another; a host
receives, computes and sends in different threads. It also returns tensors to the system as soon as
they are freed, to ask for the same pages again with the next micro-batch. One heap for all threads
that keeps what is free while steps run costs no memory at the peak and saves that work; what lies
free when a session begins or ends goes back.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_OWN_PAGES_BYTES = 32 * 2**20  # tensors from here on do not live in the heap; glibc allows no more
_SLACK_BYTES = 64 * 2**20  # free memory kept at the heap's end between micro-batches


def tend_heap() -> bool:
    """Set up the heap of this process; whether the C library agreed.

    Threads that exist keep the heaps that they have. Other systems than Linux with glibc are left
    alone.
    """
    mallopt = _function("mallopt")
    if mallopt is None:
        return False
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES),
        (_M_TRIM_THRESHOLD, _SLACK_BYTES),
    )
    return [mallopt(name, value) for name, value in settings] == [1] * len(settings)


def give_back() -> None:
    """Return all free memory to the system, also from between what is in use."""
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> Callable[..., int] | None:
    """A function of glibc; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
