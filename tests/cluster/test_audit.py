"""Audits find whoever says what is not so, name nobody else, and are right on honest devices."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster import audit as audits
from collapipe_flwr.cluster import recovery as recovering
from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.edges import open_fleet
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.config.cluster_file import ClusterConfig, parse_cluster
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import ConfigError, InfeasibleError, ScheduleError
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.compute import CPU
from collapipe_flwr.pipeline.config import ActivationNoise, ExamplePrivacy, Execution
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, FrameKind
from collapipe_flwr.pipeline.offload import LazyMapping
from collapipe_flwr.pipeline.roles import MiddleStage
from collapipe_flwr.transport.client import RemoteSession
from tests.closeness import assert_same
from tests.cluster.daemon_processes import Daemon
from tests.cluster.hosted import daemons
from tests.cluster.recovered import CUT, SEED, order
from tests.models.conftest import OVERRIDES, TOKENS
from tests.rounds import (
    ADAMW,
    DEVICES,
    Cut,
    Replicated,
    make_splitter,
    micro_batches,
    order_of,
    recovery,
    steps_of,
)
from tests.thorough import few

Make = Callable[..., MiddleStage]
STEPS, EVERY = 4, 2


def lying(device_id: str, how: str, step: int = 1, share: float = 1e-6) -> Make:
    """Stages of which that of a device does, from a step on, what no neighbour can notice."""

    class LyingStage(MiddleStage):
        _old: dict[FrameKind, Any] = {}  # noqa: RUF012

        def _lies(self, at: int) -> bool:
            return self.settings.name == device_id and at >= step

        def _send(self, link, frame):
            if frame.kind in (FrameKind.ACTIVATION, FrameKind.GRADIENT):
                tensors = dict(frame.tensors)
                name = HIDDEN if frame.kind is FrameKind.ACTIVATION else GRAD
                if self._lies(frame.step) and how == frame.kind.name:
                    tensors[name] = tensors[name] * (1 + share)
                if self._lies(frame.step) and how == "old frames":
                    tensors[name] = self._old[frame.kind, frame.micro_batch]
                self._old[frame.kind, frame.micro_batch] = tensors[name]
                frame = replace(frame, tensors=tensors)
            super()._send(link, frame)

        def _compute(self, frame, hidden):
            if self._lies(frame.step) and how == "skipped blocks":
                return hidden * 1.0
            return super()._compute(frame, hidden)

        def _apply(self, step_):
            if self._lies(step_.index) and how == "skipped update":
                self.optimizer.zero_grad()
            super()._apply(step_)
            if self._lies(step_.index) and how == "weights":
                with torch.no_grad():
                    next(iter(self.part.parameters())).mul_(1 + share)

    return LyingStage


# Each way and each device at least once.
HOWS = ("ACTIVATION", "GRADIENT", "old frames", "skipped blocks", "skipped update", "weights")


def audited(
    splitter,
    first,
    make: Make = MiddleStage,
    share: float = 1.0,
    steps: int = STEPS,
    every: int = EVERY,
) -> ClusterResult:
    asked = order(first, every=every)
    asked = replace(asked, learning=replace(asked.learning, audit_share=share))
    batches = micro_batches(splitter, steps_of(splitter, CUT, steps))
    fleet = ThreadFleet(ThreadEdge(), make)
    return train_round(splitter, asked, batches, fleet, recovery=recovery(splitter))


def test_an_audit_changes_no_bit_of_honest_training(splitter, first) -> None:
    weights = [dict(audited(splitter, first, share=share).weights) for share in (0.0, 1.0)]
    assert_same(*weights)


QUICK = set(zip(HOWS, cycle(DEVICES), strict=False))


@pytest.mark.parametrize(
    ("how", "device_id"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(HOWS, DEVICES)
    ],
)
def test_who_lies_is_named_left_out_and_what_it_did_is_undone(
    splitter, first, how: str, device_id: str
) -> None:
    result = audited(splitter, first, lying(device_id, how))
    assert set(result.quarantined) == {device_id}
    (incident,) = result.incidents
    assert incident.untrue and incident.lost == (device_id,)
    assert incident.reason.startswith(f"an audit found that {device_id} ")
    assert device_id not in result.plan.device_ids
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    honest = order(first, result.plan)
    expected = train_round(splitter, honest, batches, ThreadFleet(ThreadEdge()))
    assert_same(dict(result.weights), dict(expected.weights))


class Covering:
    """A link that changes hidden states behind the back of the stage that notes what it sends."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def send(self, frame, *, deadline_s):
        if frame.kind is FrameKind.ACTIVATION:
            wrong = {**frame.tensors, HIDDEN: frame.tensors[HIDDEN] * 1.01}
            frame = replace(frame, tensors=wrong)
        self._link.send(frame, deadline_s=deadline_s)


def telling(device_id: str, how: str) -> Make:
    """Stages of which that of a device tells of other frames than it had."""

    class TellingStage(MiddleStage):
        def __init__(self, *given, **links):
            super().__init__(*given, **links)
            if self.settings.name == device_id and how == "sent":
                self.downstream = Covering(self.downstream)

        def report(self):
            report = super().report()
            if self.settings.name == device_id and how == "another's name":
                report = replace(report, name="A/d0")
            elif self.settings.name == device_id and how != "sent":
                kept = dict(report.notes)
                for key in report.notes:
                    if key.endswith(how):
                        kept[key] = kept[key][::-1]
                report = replace(report, notes={} if how == "nothing" else kept)
            return report

    return TellingStage


@pytest.mark.parametrize(
    ("device_id", "how", "named"),
    [
        ("A/d0", "sent", {"A/d0", "A/d1"}),
        ("A/d2", "sent", {"A/d2"}),  # the edge is believed
        ("A/d0", "taken", {"A/d0"}),  # so is the control unit
        ("A/d1", "taken", {"A/d0", "A/d1"}),
        ("A/d1", "given", {"A/d1"}),
        ("A/d1", "nothing", {"A/d1"}),
        ("A/d1", "another's name", set()),  # by its place, all that it tells is true
    ],
)
def test_who_lies_of_its_frames_is_among_those_named(
    splitter, first, device_id: str, how: str, named: set[str]
) -> None:
    """It takes along nobody but the neighbour of whom it says what is not so."""
    result = audited(splitter, first, telling(device_id, how))
    assert set(result.quarantined) == named
    assert named.isdisjoint(result.plan.device_ids)
    if len(named) > 1:
        (why,) = set(result.quarantined.values())
        assert "or A/d1 claims so falsely" in why


CASES: dict[str, dict[str, Any]] = {
    "clipped": {"execution": Execution(clip_norm=0.01)},
    "computed again": {"execution": Execution(recompute=True)},
    "rounded on links": {"execution": Execution(codec="int8")},
    "private": {"privacy": ExamplePrivacy(group_norm=0.1, deviation=0.1, secret="ab")},
    "noised": {
        "activations": ActivationNoise(behind=3, norm=1.0, deviation=0.1, secret="ab"),
    },
    "optimizer kept": {"keep_optimizer": True},
}


@pytest.mark.parametrize("case", CASES)
def test_honest_devices_are_believed_however_they_train(case: str) -> None:
    """One micro-batch holds one example, as private training wants."""
    cut = Cut(stops=(2, 5), micro_batches=(1, 1, 1), schedule="1f1b")
    splitter = make_splitter("bert", 0.1)
    asked = order_of(cut, splitter.initial_weights(seed=1), ADAMW, dropout_seed=SEED)
    options = dict(CASES[case])
    learning = replace(asked.learning, audit_share=1.0, snapshot_every=3)
    learning = replace(learning, execution=options.pop("execution", learning.execution))
    asked = replace(asked, learning=learning, **options)
    batches = micro_batches(splitter, steps_of(splitter, cut, 6))
    found = train_round(
        splitter, asked, batches, ThreadFleet(ThreadEdge()), recovery=recovery(splitter)
    )
    assert not found.quarantined and not found.incidents


def test_honest_devices_are_believed_where_tables_and_parameters_are_shared() -> None:
    spec = make_spec("seq2seq", model_type="t5", overrides=OVERRIDES["t5"], **TOKENS)
    splitter = Splitter(replace(spec, ties="rows", shared="sum"))
    cut = Cut(stops=(1, splitter.num_blocks), micro_batches=(2, 1))
    asked = order_of(cut, splitter.initial_weights(seed=1), ADAMW, dropout_seed=SEED)
    asked = replace(asked, learning=replace(asked.learning, audit_share=1.0))
    batches = micro_batches(splitter, steps_of(splitter, cut, 3))
    found = train_round(splitter, asked, batches, ThreadFleet(ThreadEdge()))
    assert len(found.losses) == 3


@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_honest_daemons_are_believed_over_real_links(codec: str, at_home: bool) -> None:
    """Also with a codec that only the cluster file names, and labels that travel or do not."""
    splitter = make_splitter("bert", 0.1)
    cut = Cut(stops=(2, 5), micro_batches=(2, 1), schedule="1f1b")
    with daemons(2) as (cluster, edge):
        plan = on_devices(cluster, cut)
        if codec == "int8":
            cluster = replace(cluster, links=replace(cluster.links, codec=codec))
        else:
            plan = replace(plan, hops=(LinkConfig(codec=codec),) * 3)
        asked = order_of(cut, splitter.initial_weights(seed=1), ADAMW, dropout_seed=SEED)
        learning = replace(asked.learning, audit_share=1.0, snapshot_every=2)
        asked = replace(asked, plan=plan, learning=learning)
        batches = micro_batches(splitter, steps_of(splitter, cut, 4))
        with open_fleet(
            cluster, edge_address=edge, at_home=at_home, compute=CPU, deadline_s=60.0
        ) as fleet:
            found = train_round(splitter, asked, batches, fleet, recovery=recovery(splitter))
    assert not found.quarantined and not found.incidents


def test_a_device_returns_no_weights_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it could spoil another's, who would be blamed for it."""
    splitter = make_splitter("bert", 0.1)
    cut = Cut(stops=(2, 5), micro_batches=(2, 1), schedule="1f1b")
    theirs = splitter.segment_keys(0, 2)[0]
    fetch = RemoteSession.fetch_changed

    def fetch_more(self: RemoteSession, known: Mapping[str, Tensor], **options: Any) -> Any:
        came, moved = fetch(self, known, **options)
        if theirs not in known:
            came = LazyMapping.join(came, {theirs: torch.zeros(16)})
        return came, moved

    monkeypatch.setattr(RemoteSession, "fetch_changed", fetch_more)
    with daemons(2) as (cluster, edge):
        asked = order_of(cut, splitter.initial_weights(seed=1), ADAMW, dropout_seed=SEED)
        learning = replace(asked.learning, audit_share=1.0)
        asked = replace(asked, plan=on_devices(cluster, cut), learning=learning)
        batches = micro_batches(splitter, steps_of(splitter, cut, 1))
        with open_fleet(
            cluster, edge_address=edge, at_home=True, compute=CPU, deadline_s=60.0
        ) as fleet:
            train_round(splitter, asked, batches, fleet)


def on_devices(cluster: ClusterConfig, cut: Cut) -> ClusterPlan:
    """The plan of a cut on the devices of a cluster."""
    plan, names = cut.plan(), [cluster.device_id(device) for device in cluster.devices]
    segments = (replace(s, device_id=n) for s, n in zip(plan.segments, names, strict=True))
    return replace(plan, cluster_id=cluster.id, segments=tuple(segments))


@pytest.mark.slow
def test_a_processor_without_vector_units_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch and its libraries compute otherwise there: the bits differ, by no more than rounding.

    For AdamW the sign of a gradient counts, which rounding may change.
    """
    splitter = make_splitter("bert", 0.1)
    cut = Cut(stops=(2, 5), micro_batches=(4, 4), schedule="1f1b")
    with ExitStack() as stack:
        with monkeypatch.context() as old:
            old.setenv("ATEN_CPU_CAPABILITY", "default")
            old.setenv("DNNL_MAX_CPU_ISA", "SSE41")
            old.setenv("MKL_ENABLE_INSTRUCTIONS", "SSE4_2")
            hosts = [Daemon("device", "--name", "board-0", cold=True)]
        hosts += [Daemon("device", "--name", "board-1"), Daemon("edge")]
        for host in hosts:
            stack.callback(host.stop)
            host.wait_until_it_listens()
        boards = [{"name": f"board-{n}", "address": h.address} for n, h in enumerate(hosts[:2])]
        cluster = parse_cluster({"id": "shed", "device": boards}, Path())
        asked = order_of(cut, splitter.initial_weights(seed=1), ADAMW, dropout_seed=SEED)
        learning = replace(asked.learning, audit_share=1.0, snapshot_every=50)
        asked = replace(asked, plan=on_devices(cluster, cut), learning=learning)
        batches = micro_batches(splitter, steps_of(splitter, cut, 200))
        fleet = stack.enter_context(
            open_fleet(
                cluster,
                edge_address=hosts[2].address,
                at_home=False,
                compute=CPU,
                deadline_s=60.0,
            )
        )
        exact = list[bool]()
        monkeypatch.setattr(audits, "agree", noting(exact))
        found = train_round(splitter, asked, batches, fleet, recovery=recovery(splitter))
    assert not found.quarantined and not found.incidents
    assert not all(exact)  # else this machine has no vector units either


def noting(exact: list[bool]) -> Callable[[str, str, float], bool]:
    """Compare as audits do, and note what is equal bit by bit."""
    agree = audits.agree

    def compare(told: str, due: str, tolerance: float) -> bool:
        assert tolerance == audits.TOLERANCE
        exact.append(told == due)
        return agree(told, due, tolerance)

    return compare


def elsewhere(noise: float, *, lies: float = 0.0) -> Make:
    """Stages of which that of `A/d1` is on another kind of machine, which rounds otherwise."""

    class OtherStage(MiddleStage):
        def _compute(self, frame, hidden):
            output = super()._compute(frame, hidden)
            if self.settings.name != "A/d1":
                return output
            random = torch.Generator().manual_seed(frame.step)
            return output * (1 + lies + noise * torch.randn(output.shape, generator=random))

        def report(self):
            report = super().report()
            other = self.settings.name == "A/d1"
            return replace(report, rounding="another") if other else report

    return OtherStage


def test_other_machines_are_compared_by_a_tolerance(splitter, first) -> None:
    """Rounding passes although every bit differs, what is far beyond it does not."""
    assert not audited(splitter, first, elsewhere(1e-6)).quarantined
    found = audited(splitter, first, elsewhere(1e-6, lies=0.2))
    assert set(found.quarantined) == {"A/d1"}


def test_what_rounds_alike_has_no_tolerance(splitter, first) -> None:
    found = audited(splitter, first, lying("A/d1", "ACTIVATION", share=1e-6))
    assert set(found.quarantined) == {"A/d1"}


@pytest.mark.parametrize("seed", few(range(6), 0, 1, 5))
def test_the_first_audited_interval_finds_who_lies_in_all(
    splitter, first, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """So n intervals find it with probability 1 - (1 - p)^n: 14 with 95 % for p = 0.2."""
    share, intervals = 0.2, 14
    assert 1 - (1 - share) ** intervals > 0.95
    source = random.Random(seed)
    draws = [source.random() for _ in range(intervals)]
    monkeypatch.setattr(recovering, "_draw", random.Random(seed))
    found = audited(
        splitter, first, lying("A/d1", "weights", step=0), share=share, steps=intervals, every=1
    )
    audited_at = next((i for i, draw in enumerate(draws) if draw < share), None)
    assert [each.from_step for each in found.incidents] == (
        [] if audited_at is None else [audited_at]
    )


def test_the_share_of_audited_intervals_is_the_one_asked_for(
    splitter, first, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovering, "_draw", random.Random(3))
    with caplog.at_level(logging.INFO, logger="collapipe_flwr.cluster.audit"):
        audited(splitter, first, share=0.25, steps=40, every=1)
    done = sum(message.startswith("audited steps") for message in caplog.messages)
    assert abs(done - 10) <= 3 * math.sqrt(40 * 0.25 * 0.75)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_false_alarm_in_ten_thousand_honest_steps(splitter, first) -> None:
    found = audited(splitter, first, steps=10_000, every=100)
    assert not found.quarantined and not found.incidents


def test_a_cluster_that_cannot_do_without_the_liar_ends_its_round(splitter, first) -> None:
    asked = order(first, every=EVERY)
    asked = replace(asked, learning=replace(asked.learning, audit_share=1.0))
    batches = micro_batches(splitter, steps_of(splitter, CUT, STEPS))
    fleet = ThreadFleet(ThreadEdge(), lying("A/d1", "weights"))
    small = recovery(splitter, memory_bytes=40_000)
    with pytest.raises(
        InfeasibleError, match=r"^an audit found that A/d1 .*; the round lost A/d1$"
    ):
        train_round(splitter, asked, batches, fleet, recovery=small)


def test_a_control_unit_without_room_for_the_model_is_refused(splitter, first) -> None:
    asked = order(first)
    asked = replace(asked, learning=replace(asked.learning, audit_share=0.1))
    plans = recovery(splitter)
    unit = replace(plans.profile.control_unit, memory_bytes=1000)
    plans = replace(plans, profile=replace(plans.profile, control_unit=unit, real_links=True))
    batches = micro_batches(splitter, steps_of(splitter, CUT, 1))
    with pytest.raises(ConfigError, match=r"^trust\.audit-share needs .* holds the whole model"):
        train_round(splitter, asked, batches, ThreadFleet(ThreadEdge()), recovery=plans)


@pytest.mark.parametrize("alike", [True, False])
def test_intervals_that_are_too_long_to_judge_are_refused(
    splitter, first, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    monkeypatch.setattr(audits, "MOST_STEPS" if alike else "MOST_ROUNDED", EVERY - 1)
    make = MiddleStage if alike else elsewhere(1e-6)
    with pytest.raises(ConfigError, match=r"intervals have 2: set train\.snapshot-every=1,"):
        audited(splitter, first, make)


def test_replicas_are_refused(splitter, first) -> None:
    cut = Replicated(stops=(2, 5), micro_batches=(1, 1), replicas=(1, 2))
    asked = order_of(cut, first, ADAMW, dropout_seed=SEED)
    asked = replace(asked, learning=replace(asked.learning, audit_share=0.1))
    batches = micro_batches(splitter, steps_of(splitter, cut, 1))
    with pytest.raises(ScheduleError, match=r"trust\.audit-share=0\.1 .*scheduler\.replicas=false"):
        train_round(splitter, asked, batches, ThreadFleet(ThreadEdge()))
