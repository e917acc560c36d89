"""One heap for all threads, which asks for large pages and gives back what is free."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Threads that take small pieces open heaps of 64 MiB address space each, unless they share one.
PROGRAM = """
import sys, threading
from pathlib import Path
from collapipe_flwr.host.allocator import configure_malloc
agreed = configure_malloc() if sys.argv[1] == "share" else False
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


# A process that holds, frees and holds again; each time KiB of the heap for which large pages were
# asked (how many there are depends on what other programs have left), and KiB resident.
LARGE = """
import re, resource, sys
from pathlib import Path
from collapipe_flwr.host.allocator import configure_malloc, trim_heap
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
configure_malloc()
def size(text, name="Rss"):
    return int(re.search(name + r":\\s+(\\d+)", text)[1])
def look():
    ranges = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    heap = [text for text in ranges if "[heap]" in text]
    asked = [size(text) for text in heap if re.search(r"VmFlags:.* hg( |$)", text, re.M)]
    print(sum(asked), size(Path("/proc/self/smaps_rollup").read_text()))
held = [bytearray(b"x") * 2_000_000 for _ in range(20)]
look(); del held; trim_heap(); look()
held = [bytearray(b"x") * 2_000_000 for _ in range(20)]
look()
print(sum(int(e, 16) - int(s, 16) for line in Path("/proc/self/maps").read_text().splitlines()
    if line.endswith("[heap]") for s, e in [line.split()[0].split("-")]))
"""
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def looks(mode: str) -> tuple[list[list[int]], int]:
    lines = subprocess.run(
        [sys.executable, "-c", LARGE, mode], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return [list(map(int, line.split())) for line in lines[:-1]], int(lines[-1])


@pytest.mark.skipif(
    not PAGES.exists() or "[never]" in PAGES.read_text(), reason="this kernel gives no large pages"
)
def test_the_heap_lies_in_large_pages_also_after_it_was_given_back():
    (held, freed, again), _ = looks("free")
    assert held[0] > 30_000 and again[0] > 30_000
    assert freed[1] < held[1] - 30_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_no_addresses_are_taken_ahead_where_they_are_limited():
    assert looks("limited")[1] < 2**28 < looks("free")[1]


# A process that frees little and much, with a trim after each; MiB resident before and after it.
TRIMMED = """
import torch
from pathlib import Path
from collapipe_flwr.host.allocator import Trimmer, configure_malloc
configure_malloc()
trim = Trimmer(torch.device("cpu"))
trim()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) // 256
for pieces in (10, 100, 10):
    held = [bytearray(b"x") * 2_000_000 for _ in range(pieces)]
    del held
    before = resident()
    trim()
    print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_only_much_free_memory_is_given_back():
    words = subprocess.run(
        [sys.executable, "-c", TRIMMED], check=True, capture_output=True, text=True
    ).stdout.split()
    little, much, again = map(int, words)
    assert much > 150
    assert max(little, again) < 10
