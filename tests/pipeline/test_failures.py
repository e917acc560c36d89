"""A stage that fails takes the chain down at once, with its sentence, and applies nothing."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from collapipe_flwr.core.errors import (
    CollaPipeError,
    DataError,
    LinkError,
    LinkTimeout,
    MemberFailed,
    ModelError,
    ProtocolError,
    ScheduleError,
)
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame, FrameKind, make_memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage, LastStage, MiddleStage
from collapipe_flwr.pipeline.soundness import check_sound, describe_odd
from collapipe_flwr.pipeline.step import MicroBatch
from tests.pipeline.chains import DEADLINE_S, SGD, Chain, classic, make_batch, make_parts, settings
from tests.thorough import examples


def fail_at(part, call: int, sentence: str, kind=RuntimeError):
    """Make the forward of `part` raise in its `call`-th call."""
    plain, calls = part.forward, iter(range(1000))

    def forward(*args):
        if next(calls) == call:
            raise kind(sentence)
        return plain(*args)

    part.forward = forward


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_failing_stage_is_heard_everywhere_and_nobody_applies_the_step(stage, schedule):
    parts = make_parts((1, 1))
    before = [p.detach().clone() for part in parts for p in part.parameters()]
    fail_at(parts[stage], 2, "the board burns")
    chain = Chain(parts, classic(schedule))
    start = time.monotonic()
    with pytest.raises(LinkError, match="the board burns"), chain.running() as first:
        first.train_step(make_batch((2, 2, 2, 2)))
    assert time.monotonic() - start < DEADLINE_S / 2
    assert len(chain.failures) == 3
    after = [p for part in parts for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)


@pytest.mark.parametrize("kind", [AttributeError, AssertionError, ZeroDivisionError, ImportError])
def test_whatever_the_code_of_a_block_raises_is_told_as_an_error_of_the_model(kind):
    parts = make_parts((1,))
    fail_at(parts[1], 0, "there is no mask", kind)
    chain = Chain(parts, classic("gpipe"))
    said = "device 1 cannot compute micro-batch 0 of step 0 with tensors .*: there is no mask"
    with pytest.raises(LinkError, match=said), chain.running() as first:
        first.train_step(make_batch((2,)))
    assert isinstance(chain.failures["device 1"], ModelError)


def test_a_stage_that_hangs_is_given_up_at_the_deadline():
    parts = make_parts((1,))
    left, _silent = make_memory_pair("control unit", "device 1")
    optimizer = Optimizer(SGD, parts[0].named_parameters())
    first = FirstStage(
        parts[0], optimizer, settings("control unit", deadline_s=0.2), downstream=left
    )
    with pytest.raises(LinkTimeout, match=r"device 1 sent nothing within 0\.2 s"):
        first.train_step(make_batch((2, 2)))


def test_the_wait_for_the_next_step_is_no_shorter_than_one_inside_a_step():
    ours, theirs = make_memory_pair("edge", "device 1")
    waits, receive = [], ours.receive

    def asking(*, deadline_s):
        waits.append(deadline_s)
        return receive(deadline_s=deadline_s)

    ours.receive = asking
    part = make_parts((1,))[-1]
    patient = settings("edge", deadline_s=1800.0, idle_s=600.0)
    stage = LastStage(part, Optimizer(SGD, part.named_parameters()), patient, upstream=ours)
    theirs.send(Frame(kind=FrameKind.END), deadline_s=1)
    stage.serve()
    assert waits == [1800.0]


def test_a_wrong_weight_is_refused():
    batch = make_batch((2, 2))
    batch[1] = MicroBatch(inputs=batch[1].inputs, context=batch[1].context, weight=99)
    with (
        pytest.raises(LinkError, match="weight 99, but its labels count"),
        Chain(make_parts((1,)), classic("gpipe")).running() as first,
    ):
        first.train_step(batch)


def test_an_empty_batch_is_refused_before_anything_is_sent():
    parts = make_parts((1,))
    left, right = make_memory_pair("control unit", "device 1")
    first = FirstStage(parts[0], Optimizer(SGD, ()), settings("control unit"), downstream=left)
    with pytest.raises(ScheduleError, match="weighs 0"):
        first.train_step([])
    with pytest.raises(LinkTimeout):
        right.receive(deadline_s=0.05)


def begin(step: int = 0, **changes: object) -> Frame:
    fields = {"index": step, "micro_batches": 2, "train": True, "weight": 4.0, **changes}
    return Frame(kind=FrameKind.BEGIN, step=step, text=json.dumps(fields))


def activation(step=0, micro_batch=0, **more) -> Frame:
    tensors = {HIDDEN: torch.zeros(1, 2, 16), "labels": torch.zeros(1, 2).long()}
    scalars = {"scale": 0.5, "weight": 2.0}
    return Frame(
        kind=FrameKind.ACTIVATION,
        step=step,
        micro_batch=micro_batch,
        **{"tensors": tensors, "scalars": scalars, **more},
    )


@pytest.mark.parametrize(
    "frames",
    [
        [activation()],
        [begin(micro_batches=0.5)],
        [begin(micro_batches=10**9)],
        [begin(weight=0.0)],
        [begin(weight=float("nan"))],
        [begin(micro_batches=float("nan"))],
        [Frame(kind=FrameKind.BEGIN)],
        [begin(seed=-1)],
        [begin(seed=0.5)],
        [begin(seed=float("inf"))],
        [begin(predict="texts")],
        [begin(predict=0.5)],
        [begin(rate=float("inf"))],
        [begin(), activation(step=1)],
        [begin(), activation(micro_batch=1)],
        [begin(), activation(), activation()],
        [begin(), activation(tensors={})],
        [begin(), activation(scalars={})],
        [begin(), activation(scalars={"scale": float("nan"), "weight": 2.0})],
        [begin(), begin()],
        [begin(), Frame(kind=FrameKind.END)],
    ],
)
def test_frames_out_of_order_or_malformed_are_refused(frames):
    ours, theirs = make_memory_pair("edge", "stranger")
    part = make_parts((1,))[-1]
    stage = LastStage(
        part, Optimizer(SGD, part.named_parameters()), settings("edge"), upstream=ours
    )
    for frame in frames:
        theirs.send(frame, deadline_s=1)
    with pytest.raises(ProtocolError):
        stage.serve()
    with pytest.raises(LinkError, match="stranger sent"):
        theirs.receive(deadline_s=1)


@pytest.mark.parametrize(
    "answer",
    [
        {"tensors": {}, "scalars": {"loss": 1.0}},
        {"tensors": {GRAD: torch.zeros(2, 2)}, "scalars": {"loss": 1.0}},
        {"tensors": {GRAD: torch.zeros(1, 2, 16)}},
        {"tensors": {GRAD: torch.zeros(1, 2, 16)}, "scalars": {"loss": 1.0}, "step": 3},
    ],
)
def test_gradients_that_do_not_fit_are_refused(answer):
    (up, cu), (down, edge) = (
        make_memory_pair("device", "control unit"),
        make_memory_pair("device", "edge"),
    )
    part = make_parts((1,))[1]
    stage = MiddleStage(part, Optimizer(SGD, ()), settings("device"), upstream=up, downstream=down)
    cu.send(begin(micro_batches=1.0), deadline_s=1)
    mask = {HIDDEN: torch.zeros(1, 2, 16), "attention_mask": torch.ones(1, 2)}
    cu.send(activation(tensors=mask), deadline_s=1)
    edge.send(Frame(kind=FrameKind.GRADIENT, **answer), deadline_s=1)
    with pytest.raises(ProtocolError):
        stage.serve()


@pytest.mark.parametrize("scalars", [{}, *({"factor": x} for x in (float("nan"), -0.5, 1.5))])
def test_a_factor_that_no_clipping_gives_is_refused_and_its_sender_blamed(scalars):
    part, (up, cu) = make_parts((1,))[-1], make_memory_pair("edge", "device")
    before = [p.detach().clone() for p in part.parameters()]
    stage = LastStage(part, Optimizer(SGD, part.named_parameters()), settings("edge"), upstream=up)
    cu.send(begin(micro_batches=1, weight=2.0, settle=True), deadline_s=1)
    cu.send(activation(), deadline_s=1)
    cu.send(Frame(kind=FrameKind.COMMIT, scalars=scalars), deadline_s=1)
    with pytest.raises(MemberFailed) as failure:
        stage.serve()
    assert (failure.value.witness, failure.value.accused) == ("edge", "device")
    assert all(torch.equal(a, b) for a, b in zip(before, part.parameters(), strict=True))


@pytest.mark.parametrize("square_norm", [float("nan"), -1.0, float("inf")])
def test_a_norm_that_no_gradient_has_is_refused_and_its_sender_blamed(square_norm):
    parts, (down, device) = make_parts((1,)), make_memory_pair("control unit", "device")
    first = FirstStage(
        parts[0], Optimizer(SGD, ()), settings("control unit"), downstream=down, shared=True
    )
    hidden, (batch,) = torch.zeros(2, 7, 16), make_batch((2,))
    device.send(
        Frame(kind=FrameKind.GRADIENT, tensors={GRAD: hidden}, scalars={"loss": 1.0}),
        deadline_s=1,
    )
    device.send(Frame(kind=FrameKind.TOTALS, scalars={"square_norm": square_norm}), deadline_s=1)
    with pytest.raises(MemberFailed) as failure:
        first.train_step([batch])
    assert (failure.value.witness, failure.value.accused) == ("control unit", "device")


@pytest.mark.parametrize("name", [HIDDEN, GRAD, "sum/w", "shared/w", "rows/w"])
def test_whatever_is_added_to_weights_or_gradients_is_checked_on_arrival(name):
    link, _ = make_memory_pair("edge", "A/1")
    wrong = Frame(kind=FrameKind.SUM, tensors={name: torch.tensor([1.0, torch.nan])})
    with pytest.raises(MemberFailed) as failure:
        check_sound(wrong, "edge", link, MemberFailed.UPSTREAM)
    assert failure.value.accused == "A/1"
    check_sound(Frame(kind=FrameKind.SUM, tensors={name: torch.ones(2)}), "edge", link, -1)


class Pixels(nn.Module):
    """The first part of a model whose input holds numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 16)

    def forward(self, inputs):
        return self.project(inputs["pixels"])


@pytest.mark.parametrize("check_finite", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_numbers_of_a_batch_that_are_not_finite_are_named_with_their_tensor(train, check_finite):
    parts = [Pixels(), *make_parts((1,))[1:]]
    checked = Execution(check_finite=check_finite)
    chain = Chain(parts, lambda name, *_: settings(name, execution=checked))
    one, other = (replace(m, inputs={"pixels": torch.ones(2, 7, 4)}) for m in make_batch((2, 2)))
    other.inputs["pixels"][1, 2, 3] = torch.nan
    with pytest.raises(DataError, match="micro-batch 1 has 'pixels'"), chain.running() as first:
        (first.train_step if train else first.evaluate)([one, other])


@pytest.mark.parametrize(
    ("tensor", "odd"),
    [
        (torch.tensor([0.0, -torch.inf]), False),  # a mask
        (torch.tensor([1, 2]), False),
        (torch.tensor([0.0, torch.inf]), True),
        (torch.tensor([3.0, -torch.inf]), True),  # the logarithm of 0
        (torch.tensor([0.0, -torch.inf, torch.nan]), True),
    ],
)
def test_a_mask_is_no_odd_input(tensor, odd):
    assert bool(describe_odd({"x": tensor})) is odd


odd_tensors = st.dictionaries(
    st.sampled_from([HIDDEN, "labels", "attention_mask", GRAD, "x"]),
    st.builds(
        lambda shape, dtype: torch.ones(shape, dtype=dtype),
        st.lists(st.integers(0, 17), max_size=4),
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16]),
    ),
    max_size=4,
)
odd_frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    step=st.integers(0, 2),
    micro_batch=st.integers(0, 2),
    tensors=odd_tensors,
    scalars=st.dictionaries(
        st.sampled_from(["scale", "weight", "loss", "micro_batches", "train", "settle", "seed"]),
        st.sampled_from([0.0, 0.5, 1.0, 2.0, float("nan"), float("inf"), -1.0]),
    ),
)


@examples(15, 60)
@given(
    frames=st.lists(odd_frames | st.just(begin(micro_batches=1.0)), max_size=5),
    opening=st.booleans(),
    place=st.sampled_from([LastStage, MiddleStage]),
)
def test_any_sequence_of_frames_ends_in_an_error_of_ours_or_in_good_order(frames, opening, place):
    ours, theirs = make_memory_pair("edge", "stranger")
    down, behind = make_memory_pair("edge", "behind")
    part = make_parts((1,))[-1 if place is LastStage else 1]
    links = {"upstream": ours} if place is LastStage else {"upstream": ours, "downstream": down}
    stage = place(part, Optimizer(SGD, part.named_parameters()), settings("edge"), **links)
    for frame in [begin(micro_batches=1.0)] * opening + frames:
        theirs.send(frame, deadline_s=1)
    behind.close()
    theirs.close()
    with contextlib.suppress(CollaPipeError):
        stage.serve()
    assert all(p.isfinite().all() for p in part.parameters())
