"""What `collapipe bench round` makes of the marks of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rounds.measure import PHASES, _timing, measure
from benchmarks.rounds.watch import Process, Watch
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.client.client_process import offer_fast_program
from tests.federation.client.test_client_process import SOCKET, until

FIRST = {"planned_s": 1.0, "called_s": 5.0, "begun_s": 20.0, "ended_s": 30.0, "answered_s": 31.0}
MARKS = [
    {**FIRST, "received_s": 39.0},
    {**{name: 40.0 + at_s / 2 for name, at_s in FIRST.items()}, "received_s": 58.0},
    {**{name: 60.0 + at_s / 2 for name, at_s in FIRST.items()}, "received_s": 79.0},
]
ENDS_S = [0.0, 40.0, 60.0, 82.0]


GENERATIONS = """
import os, sys
for _ in range(2):
    print(os.getpid(), flush=True)
    if os.fork():
        os.wait()
        break
else:
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""


def test_what_a_fork_has_just_started_is_no_other_fork() -> None:
    named = [sys.executable, "-c", GENERATIONS, "client_process.py", "--forks-at"]
    with subprocess.Popen(named, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ready:
        assert ready.stdin is not None and ready.stdout is not None
        pids = [int(ready.stdout.readline()) for _ in range(3)]
        watch = Watch((ready.pid,))
        for pid in pids:
            watch._see(pid)
        ready.stdin.close()
    assert list(watch.forks) == [pids[1]] and not watch.apps
    assert watch.ready.peak_bytes > 0


def test_phases_add_up_to_the_round_and_the_first_round_does_not_count() -> None:
    watch = Watch(())
    watch.cpu_s = [(10.0, 5.0), (41.0, 9.0), (81.0, 11.0)]
    watch.apps = {1: Process(9.0, 900), 2: Process(1.0, 100), 3: Process(3.0, 200)}
    watch.forks = {12: Process(0.5, 50), 13: Process(1.5, 70)}  # the first app worked by itself
    timing = _timing(ENDS_S, MARKS, watch)
    assert tuple(timing.phases) == PHASES
    assert sum(timing.phases.values()) == pytest.approx(timing.round_s) == 21.0
    assert timing.train_s == 5.0
    assert (timing.overhead_s, timing.longest_overhead_s) == (16.0, 17.0)
    assert timing.cpu_s == 1.0
    assert (timing.app_cpu_s, timing.rss_bytes) == (3.0, 270)


@pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")
def test_a_client_app_and_its_fork_are_seen_beside_what_forks() -> None:
    nowhere = ("--runtime-api-address", "127.0.0.1:1", "--token", "x", "--insecure")
    with offer_fast_program(), Watch((os.getpid(),)) as watch:
        program = shutil.which("flwr-clientapp")
        assert program is not None
        until(Path(program).with_name(SOCKET).exists, "nothing forks")
        with subprocess.Popen([program, *nowhere], stderr=subprocess.DEVNULL) as app:
            until(lambda: app.pid in watch.apps and watch.forks, "they are not seen")
            app.kill()
    assert len(watch.forks) == len(watch.messages(1)) == 1
    assert watch.ready.peak_bytes > 10_000_000
    assert watch.messages(1)[0].peak_bytes > watch.apps[app.pid].peak_bytes


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--models tiny is not known: choose of demo, bert-6x256"
    ):
        list(measure(["tiny"], 1, print))
