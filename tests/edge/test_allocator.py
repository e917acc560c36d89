"""One heap for all threads: what one thread freed, another may use."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Threads that take small pieces open heaps of 64 MiB address space each, unless they share one.
PROGRAM = """
import sys, threading
from pathlib import Path
from collapipe_flwr.edge.allocator import tend_heap
agreed = tend_heap() if sys.argv[1] == "share" else False
def heaps():
    return sum("---p" in line for line in Path("/proc/self/maps").read_text().splitlines())
before, gate = heaps(), threading.Barrier(9)
def work():
    kept = [bytes(2000) for _ in range(100)]
    gate.wait(); gate.wait()
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
gate.wait(); print(agreed, heaps() - before); gate.wait()
"""


def opened(mode: str) -> tuple[str, int]:
    words = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], check=True, capture_output=True, text=True
    ).stdout.split()
    return words[0], int(words[1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_threads_open_no_heaps_of_their_own():
    agreed, shared = opened("share")
    assert agreed == "True"
    assert shared < opened("alone")[1]
