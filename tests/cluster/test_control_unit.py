"""A cluster's round when things go wrong: sentences, deadlines, no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest

from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.errors import LinkError, ScheduleError
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.link import Link, make_memory_pair
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.step import MicroBatch
from tests.cluster.given_edge import GivenEdge
from tests.rounds import Cut, tiny_batch

DEADLINE_S = 0.5


@pytest.fixture(scope="module")
def splitter() -> Splitter:
    sizes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    spec = make_spec(
        "sequence-classification",
        model_type="bert",
        overrides={**sizes, "intermediate_size": 8, "max_position_embeddings": 16},
        vocab_size=50,
        pad_token_id=0,
        num_labels=4,
    )
    return Splitter(spec)


def _plan(*stops: int) -> ClusterPlan:
    return Cut(stops=stops, micro_batches=(2,)).plan()


def _order(splitter: Splitter, plan: ClusterPlan, deadline_s: float = 60.0) -> TrainingOrder:
    return TrainingOrder(
        plan=plan,
        weights=splitter.initial_weights(seed=0),
        learning=LearningSettings(optimizer=OptimizerConfig(name="sgd"), deadline_s=deadline_s),
    )


def _batches(splitter: Splitter) -> Iterator[list[MicroBatch]]:
    batch = tiny_batch(splitter, 2, seed=0)
    yield [MicroBatch(inputs=batch, context=splitter.context(batch), weight=2)]


def fleet(edge: Link) -> ThreadFleet:
    return ThreadFleet(GivenEdge(lambda _: nullcontext(edge)))


def _device_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("device ")]


def test_a_silent_edge_is_given_up_at_the_deadline(splitter: Splitter) -> None:
    ours, _theirs = make_memory_pair("A/d1", "edge")
    started_s = time.monotonic()
    with pytest.raises(LinkError, match=r"edge sent nothing within 0.5 s"):
        order = _order(splitter, _plan(1, 3), DEADLINE_S)
        train_round(splitter, order, _batches(splitter), fleet(ours))
    assert time.monotonic() - started_s < 60 * DEADLINE_S
    assert not _device_threads()


def test_an_edge_that_fails_says_why(splitter: Splitter) -> None:
    ours, theirs = make_memory_pair("A/d1", "edge")
    theirs.close("the decoder ran out of memory")
    with pytest.raises(LinkError, match="the decoder ran out of memory"):
        train_round(splitter, _order(splitter, _plan(1, 3)), _batches(splitter), fleet(ours))
    assert not _device_threads()


def test_a_failing_data_source_ends_the_devices(splitter: Splitter) -> None:
    def broken() -> Iterator[list[MicroBatch]]:
        raise ValueError("the disk is gone")
        yield []

    ours, _theirs = make_memory_pair("A/d1", "edge")
    with pytest.raises(ValueError, match="the disk is gone"):
        train_round(splitter, _order(splitter, _plan(1, 3)), broken(), fleet(ours))
    assert not _device_threads()


@pytest.mark.parametrize("stops", [(1, 2), (2,)])
def test_a_plan_that_leaves_blocks_out_is_refused(
    splitter: Splitter, stops: tuple[int, ...]
) -> None:
    ours, _theirs = make_memory_pair("A/d1", "edge")
    with pytest.raises(ScheduleError, match="cover 2 blocks, the model has 3"):
        train_round(splitter, _order(splitter, _plan(*stops)), _batches(splitter), fleet(ours))


def test_a_plan_that_gives_a_block_twice_is_refused(splitter: Splitter) -> None:
    plan = _plan(2, 3)
    second = replace(plan.segments[1], first_block=1)
    ours, _theirs = make_memory_pair("A/d1", "edge")
    with pytest.raises(ScheduleError, match="exactly once"):
        train_round(
            splitter,
            _order(splitter, replace(plan, segments=(plan.segments[0], second))),
            _batches(splitter),
            fleet(ours),
        )


@pytest.mark.parametrize(
    ("schedule", "depths", "message"),
    [
        ("1f1b", (1, 2, 3), "schedule 1f1b blocks: stage 0 waits with B0 for stage 1"),
        ("gpipe", (3, 2, 1), "keeps 3 micro-batches in flight on stage 1, but warmup_depth allows"),
        ("1f1b", (300, 300, 1), "stage 1 cannot send F129 to stage 2, whose queue is full"),
    ],
)
def test_a_plan_whose_schedule_blocks_or_keeps_too_much_is_refused_before_it_runs(
    splitter: Splitter, schedule: str, depths: tuple[int, ...], message: str
) -> None:
    plan = replace(_plan(3), warmup_depth=depths, micro_batches=max(*depths, 3))
    plan = replace(plan, execution=replace(plan.execution, schedule=schedule))
    order = _order(splitter, plan)
    ours, _theirs = make_memory_pair("A/d0", "edge")
    taken = _batches(splitter)
    with pytest.raises(ScheduleError, match=message):
        train_round(splitter, order, taken, fleet(ours))
    assert next(taken)
