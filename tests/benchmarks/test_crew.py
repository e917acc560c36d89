"""The processes of a bench end with it, however it ends and whatever they are doing."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.data_plane import report as data_plane_report
from benchmarks.memory import report as memory_report
from collapipe_flwr.cli import app
from tests.core.process_trees import (
    ENDINGS,
    background,
    children_of,
    ended,
    python,
    told,
    watched,
)
from tests.forked import program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="waits on pidfds")
# A rank of a group whose other rank never comes is busy until its library gives up.
CREW = """
from benchmarks.data_plane.crew import Crew
from benchmarks.data_plane.job import Job
from benchmarks.data_plane.network import Loopback
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.core.processes import exit_on_signals
network = Loopback()
job = to_json(Job(schedule="gpipe", split=(1, 1)))
with exit_on_signals(), Crew(2, network) as crew:
    print(*(worker.pid for worker in crew._workers), flush=True)
    crew.ask(0, "join", job=job, rank=0, store=f"127.0.0.1:{network.free_port()}")
"""
DAEMONS = """
import threading
from benchmarks.data_plane.recovery import daemons
with daemons(1) as (devices, edge):
    print(edge.process.pid, *(device.process.pid for device in devices), flush=True)
    threading.Event().wait()
"""
ROLE = """
from benchmarks.memory.footprint import RoleOrder, peaks_of
from collapipe_flwr.models.describing import make_spec
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
spec = make_spec("causal-lm", model_type="llama", overrides=sizes, vocab_size=1000)
peaks_of(RoleOrder(spec_json=spec.to_json(), role="edge", steps=10**9))
"""


@pytest.mark.parametrize(
    "ending",
    [
        pytest.param(ending, marks=() if ending == signal.SIGKILL else pytest.mark.slow)
        for ending in ENDINGS
    ],
    ids=lambda sign: sign.name,
)
def test_busy_members_end_with_the_bench(ending: signal.Signals) -> None:
    with background(python(CREW)) as bench, watched(told(bench)) as members:
        bench.send_signal(ending)
        assert bench.wait(60) == (-ending if ending == signal.SIGKILL else 128 + ending)
        assert ended(members)


def test_daemons_end_with_the_bench_that_is_killed() -> None:
    with program(DAEMONS) as bench, watched(told(bench)) as hosts:
        bench.kill()
        assert ended(hosts)


def test_a_role_ends_with_the_bench_that_is_killed() -> None:
    with program(ROLE) as bench, watched(children_of(bench)) as roles:
        bench.kill()
        assert ended(roles)


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("command", "module", "inner"),
    [("pipeline", data_plane_report, "bench"), ("memory", memory_report, "measure")],
)
def test_a_bench_leaves_by_an_exception_also_in_the_background(
    monkeypatch: pytest.MonkeyPatch, sign: signal.Signals, command: str, module, inner: str
) -> None:
    undone = []

    def measuring(*_: object) -> None:
        try:
            os.kill(os.getpid(), sign)
            signal.pause()
        finally:
            os.kill(os.getpid(), sign)  # a second one does not disturb this
            undone.append(command)

    monkeypatch.setattr(module, inner, measuring)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    ours = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = CliRunner().invoke(app, ["bench", command])
    finally:
        signal.signal(signal.SIGINT, ours)
    assert (done.exit_code, undone) == (128 + sign, [command])
    assert before == {each: signal.getsignal(each) for each in before}
