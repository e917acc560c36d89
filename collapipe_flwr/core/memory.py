"""The memory that this machine, or the control group of this process, has left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def read_available_bytes() -> int:
    """Read the memory that may be used without swapping, on Linux; elsewhere all memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = next(int(li.split()[1]) * 1024 for li in lines if li.startswith("MemAvailable:"))
    return min([free, *read_group_limits()])


def read_group_limits(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> Iterator[int]:
    """Yield the bytes left within the limits of this process's control groups, version 1 and 2.

    Cached files count as free.
    """
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, name in (line.split(":", 2) for line in lines):
        if not controllers:
            place, most, used, files = root, "max", "current", "inactive_file"
        elif "memory" in controllers.split(","):
            place, files = root / "memory", "total_inactive_file"
            most, used = "limit_in_bytes", "usage_in_bytes"
        else:
            continue
        for group in (inner := place / name.lstrip("/"), *inner.parents):
            with suppress(OSError, ValueError):  # none here, or "max"
                limit, taken = (int((group / f"memory.{n}").read_text()) for n in (most, used))
                stat = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
                yield max(limit - taken + int(stat.get(files, 0)), 0)
