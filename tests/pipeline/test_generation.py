"""Laws of devices and edge in generation: a frame counts for its own text, or not at all."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError, LinkTimeout, ProtocolError
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.generation import (
    ASK,
    DONE,
    INPUT_IDS,
    PAST,
    PROMPT,
    SLOTS,
    TOKENS,
    GeneratingEdge,
    relay_generation,
)
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind, MemoryLink, make_memory_pair
from tests.pipeline.chains import DEADLINE_S

SETTINGS = StageConfig(name="edge", deadline_s=DEADLINE_S, idle_s=2 * DEADLINE_S)
END = Frame(kind=FrameKind.END)


def prompt(text: int, settings: str = "ask") -> Frame:
    tensors = {HIDDEN: torch.zeros(1, 1, 1), INPUT_IDS: torch.zeros(1, 1, dtype=torch.long)}
    return Frame(
        kind=FrameKind.ACTIVATION,
        micro_batch=text,
        tensors=tensors,
        scalars={PROMPT: 1.0, PAST: 0.0},
        text=settings,
    )


def step(text: int, value: float = 1.0) -> Frame:
    hidden = torch.full((1, 1, 1), value)
    scalars = {PAST: 1.0}
    return Frame(
        kind=FrameKind.ACTIVATION, micro_batch=text, tensors={HIDDEN: hidden}, scalars=scalars
    )


def stop(text: int) -> Frame:
    return Frame(kind=FrameKind.STOP, micro_batch=text)


def done(text: int) -> Frame:
    tensors = {TOKENS: torch.zeros(0, dtype=torch.long)}
    return Frame(kind=FrameKind.TOKENS, micro_batch=text, tensors=tensors, scalars={DONE: 1.0})


class Top(nn.Module):
    """Generates nothing, or what it is answered."""

    def train(self, mode: bool) -> Top:
        del mode
        return self

    def generate(self, prompt: Any, emit: Any, ask: Any) -> Tensor:
        if prompt.settings_json == "nothing":
            return torch.zeros(0, dtype=torch.long)
        answer: Tensor = ask(torch.tensor([[7]]), None)
        emit(torch.zeros(0, dtype=torch.long))
        return answer.flatten().long()


def edge(up: MemoryLink, slots: int = 1) -> GeneratingEdge:
    order = Frame(kind=FrameKind.SERVE, scalars={SLOTS: float(slots)})
    return GeneratingEdge(Top(), up, SETTINGS, order)


@contextmanager
def running(target: Any) -> Iterator[None]:
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_the_edge_takes_no_late_frame_for_one_of_the_next_text() -> None:
    up, device = make_memory_pair("edge", "device")

    def send(*frames: Frame) -> None:
        for frame in frames:
            device.send(frame, deadline_s=DEADLINE_S)

    def heard() -> Frame:
        return device.receive(deadline_s=DEADLINE_S)

    with running(edge(up).serve):
        send(prompt(0, "nothing"))
        assert (first := heard()).micro_batch == 0 and DONE in first.scalars
        send(step(0, 66.0), stop(0), prompt(1))
        assert (asked := heard()).micro_batch == 1 and ASK in asked.scalars
        send(step(0, 66.0), stop(0), step(1, 5.0))
        heard()  # of the new tokens, which are none
        last = heard()
        assert (last.micro_batch, last.tensors[TOKENS].tolist()) == (1, [5])
        send(END)
        assert heard().kind is FrameKind.END


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([prompt(0), prompt(1)], "began text 1 .*place of text 0, which has not ended"),
        ([prompt(0, "nothing"), prompt(0)], "began text 0 .*place of text 0"),
        ([prompt(1, "nothing"), prompt(0)], "began text 0 .*place of text 1"),
        ([prompt(-1)], "began text -1"),
        ([step(0)], "sent ACTIVATION for text 0, which has not begun"),
        ([prompt(0), stop(1)], "sent STOP for text 1, which has not begun"),
        ([prompt(0), done(0)], "sent TOKENS to the edge"),
    ],
)
def test_texts_out_of_order_are_refused(frames: list[Frame], sentence: str) -> None:
    up, device = make_memory_pair("edge", "device")
    for frame in frames:
        device.send(frame, deadline_s=DEADLINE_S)
    with pytest.raises(ProtocolError, match=f"device {sentence}"):
        edge(up).serve()


def test_more_answers_than_questions_hold_nobody_up() -> None:
    """The edge reads for all texts, so such a frame must not make it wait."""
    up, device = make_memory_pair("edge", "device")

    class Slow(Top):
        def generate(self, *_: Any) -> Tensor:
            host._texts[0].stopped.wait(DEADLINE_S)  # which the refusal does
            return torch.zeros(0, dtype=torch.long)

    host = GeneratingEdge(Slow(), up, SETTINGS, Frame(kind=FrameKind.SERVE, scalars={SLOTS: 1.0}))
    for frame in [prompt(0), *map(step, [0] * 8)]:
        device.send(frame, deadline_s=DEADLINE_S)
    with pytest.raises(ProtocolError, match="device answered more of text 0 than was asked"):
        host.serve()


def test_a_chain_that_ends_in_the_middle_of_a_text_does_not_pass_it_off_as_complete() -> None:
    up, device = make_memory_pair("edge", "device")
    with running(edge(up).serve):
        device.send(prompt(0), deadline_s=DEADLINE_S)
        assert ASK in device.receive(deadline_s=DEADLINE_S).scalars
        device.send(END, deadline_s=DEADLINE_S)
        last = device.receive(deadline_s=DEADLINE_S)
        assert DONE in last.scalars and "stopped before its end" in last.text
        assert device.receive(deadline_s=DEADLINE_S).kind is FrameKind.END


class Cache:
    """Whose end a test can see."""


class Blocks(nn.Module):
    """Adds one, and knows its caches."""

    def __init__(self) -> None:
        super().__init__()
        self.caches: list[weakref.ref[Cache]] = []

    def train(self, mode: bool) -> Blocks:
        del mode
        return self

    def new_cache(self) -> Cache:
        cache = Cache()
        self.caches.append(weakref.ref(cache))
        return cache

    def advance(self, hidden: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, Cache)
        return hidden + 1


def test_a_device_keeps_a_cache_as_long_as_its_text() -> None:
    (near, up), (down, far) = make_memory_pair("cu", "device"), make_memory_pair("device", "edge")
    blocks = Blocks()

    def down_again() -> Frame:
        return far.receive(deadline_s=DEADLINE_S)

    with running(lambda: relay_generation(blocks, up, down, SETTINGS)):
        for text in range(2):
            near.send(prompt(text), deadline_s=DEADLINE_S)
            assert down_again().micro_batch == text
        far.send(done(0), deadline_s=DEADLINE_S)
        assert near.receive(deadline_s=DEADLINE_S).micro_batch == 0
        gc.collect()
        assert [cache() is not None for cache in blocks.caches] == [False, True]
        near.send(step(0, 66.0), deadline_s=DEADLINE_S)  # on its way when the text ended
        near.send(step(1, 4.0), deadline_s=DEADLINE_S)
        found = down_again()
        assert (found.micro_batch, float(found.tensors[HIDDEN])) == (1, 5.0)
        near.send(END, deadline_s=DEADLINE_S)
        assert down_again().kind is FrameKind.END
        far.send(END, deadline_s=DEADLINE_S)


def test_an_idle_stage_ends_with_the_true_reason() -> None:
    settings = replace(SETTINGS, deadline_s=0.05, idle_s=0.05)
    reason = r"no text was asked for within 0\.05 s, the longest pause of a chain that generates"
    up, _device = make_memory_pair("edge", "device")
    order = Frame(kind=FrameKind.SERVE, scalars={SLOTS: 1.0})
    with pytest.raises(LinkTimeout, match=reason):
        GeneratingEdge(Top(), up, settings, order).serve()
    (near, up), (down, _edge) = make_memory_pair("cu", "device"), make_memory_pair("device", "edge")
    with pytest.raises(LinkError, match=reason):  # of one direction or the other
        relay_generation(Blocks(), up, down, settings)
    with pytest.raises(LinkError, match=f"device failed: {reason}"):
        near.receive(deadline_s=DEADLINE_S)
    down.close()


@pytest.mark.parametrize("kind", [FrameKind.ACTIVATION, FrameKind.TOKENS])
def test_a_frame_without_its_tensor_is_refused(kind: FrameKind) -> None:
    up, device = make_memory_pair("edge", "device")
    bare = Frame(kind=kind, scalars={PROMPT: 1.0, PAST: 0.0})
    device.send(bare, deadline_s=DEADLINE_S)
    with pytest.raises(ProtocolError, match=f"device sent {kind.name} without a tensor"):
        edge(up).serve()
