"""Rounds whose weights travel while other devices compute: that they do, and what then fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks.data_plane.recovery import Job, cluster_of, run_job, small_job
from collapipe_flwr.cluster.hosted import Hosted
from collapipe_flwr.cluster.order import RoundOrder
from collapipe_flwr.config.cluster_file import parse_cluster
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.host import service
from collapipe_flwr.pipeline.roles import MiddleStage
from collapipe_flwr.transport.client import EdgeClient
from tests.cluster.conftest import WarmDaemons
from tests.cluster.hosted import daemons
from tests.cluster.test_recovery import assert_same

SLOW = pytest.mark.slow
WAIT_S = 60.0


def overlapped(job: Job) -> Job:
    return replace(job, deadline_s=120.0, plan=replace(job.plan, overlap=True))


JOB = overlapped(small_job(3, steps=3))


@contextmanager
def in_this_process() -> Iterator[tuple[object, list[str]]]:
    """Three devices and an edge, and their addresses."""
    with daemons(3) as (config, edge):
        boards = [
            {"name": f"d{n}", "address": device.address} for n, device in enumerate(config.devices)
        ]
        values = {"id": "recovery", "device": boards, "edge": {"address": edge}}
        yield parse_cluster(values, None), [*(d["address"] for d in boards), edge]


def name_of(hosted: Hosted) -> str:
    return hosted.request.stage.name


def filling(monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[[], None]) -> None:
    """Call ``before`` when it is a device's turn to get its weights."""
    fill = Hosted.fill

    def watched(hosted: Hosted, splitter, order: RoundOrder) -> None:
        if name_of(hosted) == name:
            before()
        fill(hosted, splitter, order)

    monkeypatch.setattr(Hosted, "fill", watched)


def collecting(monkeypatch: pytest.MonkeyPatch, name: str, before: Callable[[], None]) -> None:
    """Call ``before`` when a device has ended, before its weights are fetched."""
    collect = Hosted.collect

    def watched(hosted: Hosted, *how):
        if name_of(hosted) == name:
            hosted.session.await_end()
            before()
        return collect(hosted, *how)

    monkeypatch.setattr(Hosted, "collect", watched)


def test_a_device_computes_before_the_next_has_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = threading.Event()

    class Telling(MiddleStage):
        def _emit(self, frame, output):
            super()._emit(frame, output)
            if self.settings.name == "recovery/d0":
                computed.set()

    def wait() -> None:
        assert computed.wait(WAIT_S), "the first device waits for the last one's weights"

    monkeypatch.setattr(service, "MiddleStage", Telling)
    filling(monkeypatch, "recovery/d2", wait)
    with in_this_process() as (cluster, _):
        result, _ = run_job(JOB, cluster)
    assert len(result.losses) == JOB.steps


def test_a_device_is_collected_while_one_ahead_of_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collected, waited, collect = threading.Event(), threading.Event(), Hosted.collect

    class Waiting(MiddleStage):
        def _apply(self, step):
            if self.settings.name == "recovery/d0" and step.last:
                waited.set()
                assert collected.wait(WAIT_S), "the last device waits for the first one's end"
            super()._apply(step)

    def watched(hosted: Hosted, *how):
        found = collect(hosted, *how)
        if name_of(hosted) == "recovery/d2":
            collected.set()
        return found

    monkeypatch.setattr(service, "MiddleStage", Waiting)
    monkeypatch.setattr(Hosted, "collect", watched)
    with in_this_process() as (cluster, _):
        result, _ = run_job(JOB, cluster)
    assert waited.is_set()
    names = [report.name for report in result.reports]
    assert names == ["control-unit", *(f"recovery/d{n}" for n in range(3)), "edge"]


def test_weights_that_cannot_be_sent_fail_the_round_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have begun; after three attempts the reason is raised, and not theirs."""

    def refuse() -> None:
        raise LinkError("no room for these weights")

    filling(monkeypatch, "recovery/d1", refuse)
    monkeypatch.setattr("collapipe_flwr.cluster.suspects.Suspects.quarantine", lambda *_, **__: "")
    with in_this_process() as (cluster, addresses):
        with pytest.raises(LinkError, match="no room for these weights"):
            run_job(JOB, cluster)
        for address in addresses:
            with EdgeClient(address) as client:
                assert client.health().sessions == 0
    assert not [t for t in threading.enumerate() if t.name.startswith(("hand-out", "collect"))]


@pytest.mark.parametrize(
    ("before", "victim", "every"),
    [
        (filling, 2, 0),
        (collecting, 2, 0),
        pytest.param(filling, 0, 0, marks=SLOW),
        pytest.param(filling, 1, 2, marks=SLOW),
        pytest.param(collecting, 1, 0, marks=SLOW),
        pytest.param(collecting, 0, 1, marks=SLOW),
    ],
)
def test_a_device_that_dies_before_its_weights_travel_is_planned_around(
    warm_daemons: WarmDaemons, monkeypatch: pytest.MonkeyPatch, before, victim: int, every: int
) -> None:
    """The weights are those of an undisturbed round by the plan without it."""
    hosts, edge = warm_daemons()
    cluster, job = cluster_of(hosts, edge), replace(JOB, snapshot_every=every)
    before(monkeypatch, f"recovery/d{victim}", hosts[victim].process.kill)
    result, weights = run_job(job, cluster)
    monkeypatch.undo()
    (incident,) = result.incidents
    assert incident.lost == (f"recovery/d{victim}",)
    assert result.plan.overlap
    assert len(result.losses) == job.steps
    _, undisturbed = run_job(replace(job, plan=replace(result.plan, overlap=False)), cluster)
    assert_same(weights, undisturbed)
