"""Real daemons that are killed, suspended or restarted in the middle of a round."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks.data_plane.recovery import Daemon, cluster_of, daemons, run_job, small_job
from collapipe_flwr.cluster.hosted import CLOSE_S
from collapipe_flwr.cluster.order import PATIENCE_PER_STAGE
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import MemberConfig
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.pipeline.roles import FirstStage
from tests.closeness import assert_same
from tests.cluster.conftest import WarmDaemons
from tests.cluster.daemon_processes import Daemon as Spare
from tests.cluster.daemon_processes import running

JOB = replace(small_job(3, steps=4), deadline_s=120.0)
NOTICE_S = 20.0  # on a starved machine; a closed connection tells, long before any deadline
SLACK_S = 30.0  # on a machine that does much else


@contextmanager
def striking(phase: str, step: int, strike: Callable[[], None]) -> Iterator[list[float]]:
    """When the control unit is at its second micro-batch of a phase, somebody else is hit, once.

    ``placing`` and ``collecting`` are before the first step of a chain, and behind its last.
    """
    struck_s: list[float] = []
    around = {"placing": (RemoteFleet, "open_chain"), "collecting": (RemoteFleet, "collect")}
    owner, name = around.get(phase, (RemoteFleet, "open_chain"))
    method = getattr(owner, name)

    def hit_first(*args, **more):
        if not struck_s:
            struck_s.append(time.monotonic())
            strike()
        return method(*args, **more)

    def hit(at_step: int, micro_batch: int) -> None:
        if not struck_s and (at_step, micro_batch) == (step, 1):
            struck_s.append(time.monotonic())
            strike()

    class Watched(FirstStage):
        def _emit(self, frame, output):
            super()._emit(frame, output)
            if phase == "forward":
                hit(frame.step, frame.micro_batch)

        def _take_gradient(self, step, micro_batch):
            frame = super()._take_gradient(step, micro_batch)
            if phase == "backward":
                hit(step.index, micro_batch)
            return frame

        def _apply(self, step):
            if phase == "apply":
                hit(step.index, 1)
            super()._apply(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collapipe_flwr.cluster.recovery.FirstStage", Watched)
        if phase in around:
            patch.setattr(owner, name, hit_first)
        yield struck_s


SLOW = pytest.mark.slow
POINTS = [
    ("backward", 1, 1, 0),
    pytest.param("forward", 0, 0, 0, marks=SLOW),
    pytest.param("forward", 2, 2, 1, marks=SLOW),
    pytest.param("backward", 3, 2, 2, marks=SLOW),
    pytest.param("apply", 1, 0, 1, marks=SLOW),
    pytest.param("apply", 3, 1, 0, marks=SLOW),
]


@pytest.mark.parametrize(("phase", "step", "victim", "every"), POINTS)
def test_a_killed_device_is_noticed_at_once_and_the_weights_are_those_of_the_new_plan(
    warm_daemons: WarmDaemons, phase: str, step: int, victim: int, every: int
) -> None:
    job = replace(JOB, snapshot_every=every)
    hosts, edge = warm_daemons()
    cluster = cluster_of(hosts, edge)
    with striking(phase, step, hosts[victim].process.kill) as struck_s:
        result, weights = run_job(job, cluster)
    (incident,) = result.incidents
    assert incident.lost == (f"recovery/d{victim}",)
    assert incident.noticed_s - struck_s[0] < NOTICE_S
    assert len(result.losses) == job.steps
    _, undisturbed = run_job(replace(job, plan=result.plan), cluster)
    assert_same(weights, undisturbed)


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=SLOW)])
def test_a_killed_replica_is_noticed_at_once_and_no_block_moves(
    warm_daemons: WarmDaemons, victim: int
) -> None:
    first, second = small_job(2, steps=4).plan.segments
    alike = replace(second, replicas=("recovery/d2",))
    job = replace(JOB, plan=replace(small_job(2).plan, segments=(first, alike)))
    hosts, edge = warm_daemons()
    cluster = cluster_of(hosts, edge)
    with striking("backward", 1, hosts[victim].process.kill) as struck_s:
        result, weights = run_job(job, cluster)
    (incident,) = result.incidents
    assert incident.lost == (f"recovery/d{victim}",)
    assert incident.noticed_s - struck_s[0] < NOTICE_S
    spans = [(s.first_block, s.stop_block) for s in result.plan.segments]
    assert spans == [(s.first_block, s.stop_block) for s in job.plan.segments]
    _, undisturbed = run_job(replace(job, plan=result.plan), cluster)
    assert_same(weights, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_hanging_device_is_lost_at_its_deadline_and_may_rejoin(victim: int) -> None:
    job = replace(JOB, deadline_s=3.0)
    with daemons(3) as (hosts, edge):
        cluster = cluster_of(hosts, edge)
        stop = hosts[victim].process
        with striking("backward", 1, lambda: stop.send_signal(signal.SIGSTOP)) as struck_s:
            result, weights = run_job(job, cluster)
        (incident,) = result.incidents
        assert incident.lost == (f"recovery/d{victim}",)
        patience_s = job.deadline_s * (1 + 3 * PATIENCE_PER_STAGE)  # of the control unit
        assert incident.noticed_s - struck_s[0] < patience_s + CLOSE_S + SLACK_S
        _, undisturbed = run_job(replace(job, plan=result.plan), cluster)
        assert_same(weights, undisturbed)
        stop.send_signal(signal.SIGCONT)
        again, _ = run_job(job, cluster)
    assert again.plan == job.plan and not again.incidents


@pytest.mark.slow
@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("phase", ["forward", "backward", "apply", "collecting"])
def test_an_edge_that_restarts_is_waited_for_and_the_steps_replayed(phase: str, every: int) -> None:
    job = replace(JOB, snapshot_every=every)
    later: list[Daemon] = []
    with daemons(3) as (hosts, edge):
        cluster = cluster_of(hosts, edge)

        def restart() -> None:
            edge.process.kill()
            edge.process.wait(60)
            later.append(Daemon("edge", listen=edge.address))

        try:
            with striking(phase, 2, restart) as struck_s:
                result, weights = run_job(job, cluster)
            (incident,) = result.incidents
            # What is collected with snapshots is the first interval, of one step.
            step = 0 if phase == "collecting" else 2
            assert incident.lost == () and incident.from_step == (step if every else 0)
            if phase != "collecting":  # nobody needs it then, until it is asked to keep the end
                assert incident.noticed_s - struck_s[0] < NOTICE_S
            _, undisturbed = run_job(job, cluster)
            assert_same(weights, undisturbed)
        finally:
            for daemon in later:
                daemon.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "every"), [("backward", 0), ("apply", 1)])
def test_an_edge_that_is_killed_is_replaced_by_the_next(phase: str, every: int) -> None:
    job = replace(JOB, snapshot_every=every, plan=replace(JOB.plan, edge="edge"))
    with daemons(3) as (hosts, edge), running(Spare("edge")) as (spare,):
        table = MemberConfig(name="spare", address=spare.address)
        cluster = replace(cluster_of(hosts, edge), other_edges=(table,))
        with striking(phase, 2, edge.process.kill):
            result, weights = run_job(job, cluster)
        (first, *_, last) = (*result.incidents, *result.incidents)
        assert result.plan.edge == "spare" and last.lost == ("edge",)
        assert first.from_step == (2 if every else 0)
        _, undisturbed = run_job(replace(job, plan=result.plan), cluster)
        assert_same(weights, undisturbed)


@pytest.mark.slow
def test_with_nobody_left_the_round_fails_with_one_sentence() -> None:
    job = small_job(1, steps=2)
    with (
        daemons(1) as (hosts, edge),
        striking("forward", 1, hosts[0].process.kill),
        pytest.raises(InfeasibleError, match=r"lost all its devices \(recovery/d0\)"),
    ):
        run_job(job, cluster_of(hosts, edge))
