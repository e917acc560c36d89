"""Every hop of a chain behaves as its plan says: its own codec, its own rate in each direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.hosted import HostedEdge, ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterLinks
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.links import LinkConfig, Note
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.core.wire import measure_bit_per_s
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch
from tests.cluster.hosted import daemons
from tests.rounds import Cut, profile, tiny_batch

SGD = OptimizerConfig(name="sgd")
EXAMPLES, STEPS = 8, 3
AT_LEAST = 0.3  # of a paced rate, on a machine that may be busy
RATES = ((2e6, 3e6), (1.5e6, 4e6), (1e6, 2e6))  # bit/s per hop: forward, backward


@pytest.fixture(scope="module")
def splitter() -> Splitter:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    exact = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    spec = make_spec(
        "sequence-classification",
        model_type="bert",
        overrides={**sizes, **exact, "intermediate_size": 32, "max_position_embeddings": 16},
        vocab_size=50,
        pad_token_id=0,
        num_labels=4,
    )
    return Splitter(spec)


def _plan(names: tuple[str, str], hops: tuple[LinkConfig, ...]) -> ClusterPlan:
    plan = Cut(stops=(1, 2), micro_batches=(EXAMPLES,)).plan()
    segments = tuple(
        replace(segment, device_id=name) for segment, name in zip(plan.segments, names, strict=True)
    )
    return replace(plan, segments=segments, hops=hops)


def _order(splitter: Splitter, plan: ClusterPlan, *, paced: bool, every: int = 0) -> TrainingOrder:
    return TrainingOrder(
        plan=plan,
        weights=splitter.initial_weights(seed=0),
        learning=LearningSettings(
            optimizer=SGD,
            deadline_s=20.0,
            execution=Execution(paced=paced),
            snapshot_every=every,
        ),
    )


def _train(
    splitter: Splitter, order: TrainingOrder, fleet: Fleet, recovery: Recovery | None = None
) -> ClusterResult:
    def batches() -> Iterator[list[MicroBatch]]:
        for step in range(STEPS):
            batch = tiny_batch(splitter, EXAMPLES, seed=step)
            context = splitter.context(batch)
            yield [MicroBatch(inputs=batch, context=context, weight=EXAMPLES)] * 2

    return train_round(splitter, order, batches(), fleet, recovery=recovery)


def _round(
    splitter: Splitter,
    hops: tuple[LinkConfig, ...],
    *,
    paced: bool = False,
    remote: bool = True,
    links: ClusterLinks | None = None,
    snapshot_every: int = 0,
) -> ClusterResult:
    """One round over two devices."""
    with daemons(2) as (cluster, address):
        cluster = replace(cluster, links=links or ClusterLinks())
        names = tuple(cluster.device_id(device) for device in cluster.devices)
        order = _order(
            splitter, _plan((names[0], names[1]), hops), paced=paced, every=snapshot_every
        )
        fleet: Fleet = RemoteFleet(cluster=cluster, edges={"": HostedEdge(address=address)})
        if not remote:
            fleet = ThreadFleet(ThreadEdge())
        recovery = Recovery(
            profile=profile(),
            model=lambda: profile_model(splitter, BatchShape(source_length=8, target_length=1)),
        )
        return _train(splitter, order, fleet, recovery)


def _measured(reports: Sequence[StageMeasurement]) -> list[tuple[float, float]]:
    """Bits per second of every hop, forward and backward, as the senders saw it."""
    return [
        (
            8 * here.sent_down.bytes / here.sent_down.sending_s,
            8 * behind.sent_up.bytes / behind.sent_up.sending_s,
        )
        for here, behind in pairwise(reports)
    ]


def _hops(rates: tuple[tuple[float, float], ...]) -> tuple[LinkConfig, ...]:
    return tuple(LinkConfig(forward_bit_per_s=f, backward_bit_per_s=b) for f, b in rates)


@pytest.mark.parametrize("remote", [True, False], ids=["daemons", "threads"])
def test_paced_senders_keep_to_the_planned_rates(splitter: Splitter, remote: bool) -> None:
    result = _round(splitter, _hops(RATES), paced=True, remote=remote)
    reports = result.reports
    for (forward, backward), (ahead, back) in zip(_measured(reports), RATES, strict=True):
        assert AT_LEAST * ahead < forward < 1.02 * ahead
        assert AT_LEAST * back < backward < 1.02 * back
    carried_s = sum(r.sent_down.bytes * 8 / RATES[k][0] for k, r in enumerate(reports[:-1])) / 2
    assert result.wall_s > carried_s / STEPS  # it is not only the meter that waits


def test_the_cluster_file_stays_the_upper_limit(splitter: Splitter) -> None:
    limit = ClusterLinks(rate_mbit_per_s=1.8)
    reports = _round(splitter, _hops(RATES), paced=True, links=limit).reports
    for (forward, backward), (ahead, back) in zip(_measured(reports), RATES, strict=True):
        assert AT_LEAST * min(ahead, 1.8e6) < forward < 1.02 * min(ahead, 1.8e6)
        assert AT_LEAST * min(back, 1.8e6) < backward < 1.02 * min(back, 1.8e6)


def test_nobody_is_paced_unless_the_run_says_so(splitter: Splitter) -> None:
    slow = _hops(((1e3, 1e3),) * 3)  # one of twelve frames would take two minutes
    for remote in (True, False):
        assert _round(splitter, slow, remote=remote).wall_s < 120


@pytest.mark.parametrize("remote", [True, False], ids=["daemons", "threads"])
def test_every_hop_has_the_codec_of_its_plan(splitter: Splitter, remote: bool) -> None:
    names = ("int8", "fp32", "bf16")
    exact = _round(splitter, (LinkConfig(),) * 3, remote=remote).reports
    hops = tuple(LinkConfig(codec=name) for name in names)
    coded = _round(splitter, hops, remote=remote).reports
    for hop, most in enumerate((0.5, 1.0, 0.7)):
        for sent in ("sent_down", "sent_up"):
            stage = hop if sent == "sent_down" else hop + 1
            share = getattr(coded[stage], sent).bytes / getattr(exact[stage], sent).bytes
            assert share == 1.0 if most == 1.0 else share < most


def test_threads_lose_what_daemons_lose(splitter: Splitter) -> None:
    hops = tuple(LinkConfig(codec=name) for name in ("int8", "fp32", "bf16"))
    far, near = (_round(splitter, hops, remote=remote) for remote in (True, False))
    assert far.losses == near.losses
    assert all(torch.equal(far.weights[key], near.weights[key]) for key in far.weights)


def test_a_codec_in_the_cluster_file_stands_above_the_plan(splitter: Splitter) -> None:
    hops = (LinkConfig(),) * 3
    bound = _round(splitter, hops, links=ClusterLinks(codec="int8")).reports
    exact = _round(splitter, hops).reports
    assert bound[1].sent_down.bytes < 0.5 * exact[1].sent_down.bytes


WIRE_BIT_PER_S = 1e8
Notes = tuple[Note, ...]


def _over_wire(left: Notes, arrived: Notes) -> tuple[Notes, Notes]:
    """The notes of both ends as if a wire of one rate had carried the frames.

    Either end may have gone before it noted the last one of a stream.
    """
    sizes = {tuple(frame): size for *frame, _, size in arrived}
    free_s, there = 0.0, []
    for *frame, left_s, size in left:
        assert size == sizes.get(tuple(frame), size)
        free_s = max(free_s, left_s) + 8 * size / WIRE_BIT_PER_S
        there.append((*frame, free_s, size))
    return left, tuple(there)


@pytest.mark.parametrize("every", [0, 1])
def test_the_rate_of_a_wire_is_the_same_with_snapshots_and_without(
    splitter: Splitter, every: int
) -> None:
    reports = _round(splitter, (LinkConfig(),) * 3, snapshot_every=every).reports
    for here, behind in pairwise(reports):
        for left, arrived in (
            (here.sent_down.notes, behind.received_up.notes),
            (behind.sent_up.notes, here.received_down.notes),
        ):
            frames = {tuple(frame) for *frame, _, _ in arrived}
            assert len(frames) == len(arrived) > 2 * STEPS  # none looks like another
            rate = measure_bit_per_s(*_over_wire(left, arrived))
            assert rate == pytest.approx(WIRE_BIT_PER_S, rel=0.02)


@pytest.mark.parametrize("every", [0, 1])
def test_the_edge_reports_the_bytes_of_the_last_device(splitter: Splitter, every: int) -> None:
    reports = _round(splitter, (LinkConfig(),) * 3, snapshot_every=every).reports
    last, edge = reports[-2:]
    assert edge.steps == last.steps == STEPS
    assert edge.received_up.bytes == last.sent_down.bytes > 0
    assert edge.sent_up.bytes == last.received_down.bytes > 0
