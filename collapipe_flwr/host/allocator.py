"""Configuration of glibc's heap for a process with few big tensors that come and go.

glibc gives every thread a heap of its own, and memory freed in one cannot serve another, while a
host receives, computes and sends in different threads. It also returns freed tensors to the system
at once, only to ask for the same pages again with the next micro-batch. One heap for all threads
that keeps free memory while steps run saves that work. It costs memory where large tensors come and
go, as at a head, since they leave gaps in which the next ones may not fit: the peak is higher, and
not the same in every run. When a session begins or ends, free memory is returned to the system if
there is much of it: the next round would ask for a few pages again, which costs more than they are
worth.

The heap asks for large pages as well: with pages of 4 KiB, matrix products wait for the processor's
table of page addresses, most of all in virtual machines. This has an effect where the kernel gives
large pages on request (`madvise` in /sys/kernel/mm/transparent_hugepage/enabled).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # imported after the heap has been configured

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_OWN_PAGES_BYTES = 32 * 2**20  # larger tensors do not live in the heap; glibc allows no more
_SLACK_BYTES = 64 * 2**20  # free memory kept at the heap's end between micro-batches, at least
_AHEAD_BYTES = 2**30  # addresses, not memory: the heap grows into what has asked for large pages
_MAPS = Path("/proc/self/maps")
_STATM = Path("/proc/self/statm")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_COUNTED = "2"  # in that file: the system counts reserved addresses as memory


def configure_malloc() -> bool:
    """Configure the heap of this process; return whether the C library accepted it.

    Does nothing except on Linux with glibc. Existing threads keep their heaps.
    """
    mallopt = _find_function("mallopt")
    if mallopt is None:
        return False
    ahead_bytes = _choose_ahead_bytes()
    settings = (
        (_M_ARENA_MAX, 1),
        (_M_MMAP_THRESHOLD, _OWN_PAGES_BYTES),
        (_M_TRIM_THRESHOLD, max(_SLACK_BYTES, ahead_bytes)),
        (_M_TOP_PAD, ahead_bytes),
    )
    agreed = [mallopt(name, value) for name, value in settings] == [1] * len(settings)
    _ask_for_large_pages()
    return agreed


@contextmanager
def use_one_heap() -> Iterator[None]:
    """Configure the heap for the body, and return free memory to the system after it."""
    configure_malloc()
    try:
        yield
    finally:
        trim_heap()


def trim_heap(place: torch.device | None = None) -> None:
    """Return all free memory to the system, also from between allocations.

    For an accelerator also the memory that torch keeps for later tensors: other programs cannot use
    it, and it would not count as free.
    """
    trim = _find_function("malloc_trim")
    if trim is not None:
        trim(0)
        _ask_for_large_pages()
    if place is not None and place.type != "cpu":
        sys.modules["torch"].get_device_module(place.type).empty_cache()


class Trimmer:
    """Trims the heap, when called, if there is much to return; see `trim_heap` for ``place``.

    What is resident without being in use also counts libraries and the like, so it is compared with
    what the last trim left of it.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._left_bytes = 0

    def __call__(self) -> None:
        unused_bytes = _count_unused_bytes()
        is_much = unused_bytes is None or unused_bytes > self._left_bytes + _SLACK_BYTES
        if is_much or self._place.type != "cpu":
            trim_heap(self._place)
            self._left_bytes = _count_unused_bytes() or 0


class _Usage(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: ten sizes."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def _count_unused_bytes() -> int | None:
    """Return the resident bytes that the heap does not use; None where it does not tell."""
    read: Any = _find_function("mallinfo2")  # of glibc 2.33
    if read is None:
        return None
    read.restype = _Usage
    sizes = read().sizes
    own_pages, in_heap = sizes[4], sizes[7]  # hblkhd and uordblks
    resident_bytes = int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    return int(resident_bytes - own_pages - in_heap)


def _choose_ahead_bytes() -> int:
    """Return how far the heap may grow at once; 0 where addresses are counted as memory."""
    import resource  # which other systems do not have

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return 0
    if _OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == _COUNTED:
        return 0
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_AHEAD_BYTES, memory_bytes // 4)


def _ask_for_large_pages() -> None:
    """Ask for large pages for the heap, and for the addresses into which it will grow."""
    malloc, free, madvise = (
        _find_function("malloc"),
        _find_function("free"),
        _find_function("madvise"),
    )
    if not (malloc and free and madvise and hasattr(mmap, "MADV_HUGEPAGE")):
        return
    malloc.restype = ctypes.c_void_p  # type: ignore[attr-defined]
    grown = malloc(_OWN_PAGES_BYTES // 2)
    for start, stop in _list_heap_ranges():
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_HUGEPAGE)
    free(ctypes.c_void_p(grown))


def _list_heap_ranges() -> list[tuple[int, int]]:
    """Return the heap's ranges of addresses, which are adjacent lines before all libraries."""
    found = []
    with _MAPS.open() as lines:
        for line in lines:
            if line.endswith("[heap]\n"):
                first, last = line.split(maxsplit=1)[0].split("-")
                found.append((int(first, 16), int(last, 16)))
            elif found:
                break
    return found


def _find_function(name: str) -> Callable[..., int] | None:
    """Find a function of glibc; None elsewhere."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
