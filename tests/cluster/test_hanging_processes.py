"""Real daemons that hang (SIGSTOP) and come back (SIGCONT): the heartbeat tells, in any phase.

Deadlines are long here, so that nothing but the heartbeat can be what notices.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import replace

import pytest

from benchmarks.data_plane.recovery import Daemon, cluster_of, daemons, run_job, small_job
from collapipe_flwr.cluster.remote import PROBE_S
from collapipe_flwr.core.links import Heartbeat
from collapipe_flwr.transport.client import HostClient
from tests.closeness import assert_same
from tests.cluster.conftest import WarmDaemons
from tests.cluster.test_killed_processes import striking

HEARTBEAT = Heartbeat(period_s=0.5, misses=8)  # a starved device is not to be taken for lost
JOB = replace(small_job(3, steps=4), deadline_s=120.0, heartbeat=HEARTBEAT)
SLACK_S = 30.0  # to break off, to tell and to ask all devices, on a machine that does much else
SLOW = pytest.mark.slow


def sessions_of(daemon: Daemon) -> int:
    with HostClient(daemon.address) as client:
        return client.ask_health().sessions


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "victim"),
    [
        ("backward", 1),
        pytest.param("placing", 0, marks=SLOW),
        pytest.param("placing", 2, marks=SLOW),
        pytest.param("forward", 0, marks=SLOW),
        pytest.param("backward", 2, marks=SLOW),
        pytest.param("apply", 1, marks=SLOW),
        pytest.param("collecting", 0, marks=SLOW),
        pytest.param("collecting", 1, marks=SLOW),
    ],
)
def test_a_device_that_hangs_is_lost_by_its_heartbeat_and_takes_part_again_when_it_is_back(
    warm_daemons: WarmDaemons, phase: str, victim: int
) -> None:
    hosts, edge = warm_daemons()
    cluster, process = cluster_of(hosts, edge), hosts[victim].process
    run_job(replace(JOB, steps=1), cluster)  # all have loaded their libraries
    with striking(phase, 1, lambda: process.send_signal(signal.SIGSTOP)) as struck_s:
        result, weights = run_job(JOB, cluster)
    (incident,) = result.incidents
    assert incident.lost == (f"recovery/d{victim}",)
    limit_s = HEARTBEAT.lost_after_s + PROBE_S + SLACK_S
    assert incident.noticed_s - struck_s[0] < limit_s
    process.send_signal(signal.SIGCONT)
    again, undisturbed = run_job(replace(JOB, plan=result.plan), cluster)
    assert_same(weights, undisturbed)
    again, _ = run_job(JOB, cluster)
    assert again.plan == JOB.plan and not again.incidents
    assert [sessions_of(host) for host in hosts] == [0, 0, 0]


@SLOW
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_edge_that_hangs_for_a_while_is_waited_for_and_the_steps_replayed(phase: str) -> None:
    with daemons(3) as (hosts, edge):
        cluster = cluster_of(hosts, edge)

        def hang() -> None:
            edge.process.send_signal(signal.SIGSTOP)
            back = threading.Timer(6.0, edge.process.send_signal, (signal.SIGCONT,))
            back.start()

        with striking(phase, 1, hang) as struck_s:
            result, weights = run_job(JOB, cluster)
        (incident,) = result.incidents
        assert incident.lost == ()
        assert incident.noticed_s - struck_s[0] < HEARTBEAT.lost_after_s + SLACK_S
        _, undisturbed = run_job(JOB, cluster)
        assert_same(weights, undisturbed)


@SLOW
def test_a_device_that_is_slow_beyond_all_heartbeats_is_not_lost() -> None:
    """Suspended and resumed ten times a second it is slow, but never silent for long."""
    quick = Heartbeat(period_s=0.5, misses=3)
    job = replace(JOB, heartbeat=quick)
    with daemons(3) as (hosts, edge):
        cluster, process, over = cluster_of(hosts, edge), hosts[1].process, threading.Event()

        def drag() -> None:
            while not over.wait(0.01):
                process.send_signal(signal.SIGSTOP)
                over.wait(0.2)
                process.send_signal(signal.SIGCONT)

        dragging = threading.Thread(target=drag)
        dragging.start()
        try:
            result, weights = run_job(job, cluster)
        finally:
            over.set()
            dragging.join()
        assert not result.incidents and result.wall_s > 2 * quick.lost_after_s
        _, undisturbed = run_job(job, cluster)
        assert_same(weights, undisturbed)
