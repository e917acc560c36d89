"""Both runtimes in real processes: the same loss, and a cost of the wire that is no accident."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from benchmarks import child_environment
from benchmarks.data_plane import crew as crews
from benchmarks.data_plane.crew import BenchError, Crew
from benchmarks.data_plane.duel import Arena, Pace, torch_of_peer
from benchmarks.data_plane.job import Job
from benchmarks.data_plane.model import Shape
from benchmarks.data_plane.network import Loopback, Network
from benchmarks.data_plane.wire import Load, wire_cost
from tests.forked import Forked

MEMBER = "benchmarks.data_plane.member"
SHAPE = Shape(width=32, tokens=16, micro_batch=2, micro_batches=3)


@pytest.fixture(autouse=True)
def _members_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that import everything themselves are in test_crew.py."""

    def start(command: Sequence[str], network: Network, index: int, certificates: str) -> Forked:
        assert not command and not certificates
        env = {**child_environment(), "GLOO_SOCKET_IFNAME": network.interface}
        return Forked(MEMBER, network.host(index), env=env, talks=True)

    if sys.platform == "linux":
        monkeypatch.setattr(crews, "_start", start)


@pytest.mark.skipif(torch_of_peer().startswith("2.9."), reason="torch 2.9 cannot run the peer")
def test_both_sides_train_the_same_model():
    network = Loopback()
    with Crew(2, network) as ours, Crew(2, network) as theirs:
        arena = Arena(ours, theirs, network)
        for schedule in ("gpipe", "1f1b"):  # the processes serve one case after the other
            job = Job(schedule=schedule, split=(1, 1), shape=SHAPE)
            duel = arena.duel(job, job, Pace(warm=1, turns=2, steps=2))
            assert duel.ours.loss == pytest.approx(duel.theirs.loss, rel=1e-5)
            assert len(duel.ours.steps_s) == len(duel.theirs.steps_s) == 2
            assert duel.bound_ratio > 0.5
            assert 0 < duel.busiest_s <= duel.bound_s
            low, high = duel.ratio_quartiles
            assert low <= duel.ratio <= high
        other = Job(schedule="gpipe", split=(2, 1), shape=SHAPE)
        with pytest.raises(BenchError, match="disagree"):
            arena.duel(job, other, Pace(warm=0, turns=1))


@pytest.mark.parametrize(
    ("turns", "openings", "shares"), [(51, 3, [17, 17, 17]), (8, 3, [3, 3, 2]), (2, 3, [1, 1])]
)
def test_openings_share_the_turns(turns, openings, shares):
    parts = Pace(turns=turns, openings=openings).by_opening()
    assert [part.turns for part in parts] == shares


def test_moving_bytes_costs_time_on_both_ends():
    with Crew(1, Loopback()) as crew:
        cost = wire_cost(crew, Load(frame_bytes=2**18, frames=32), None)
        with pytest.raises(BenchError, match="process 0"):
            crew.ask(0, "no such question")
    assert 0.05 < cost.cpu_s_per_gb < 100
