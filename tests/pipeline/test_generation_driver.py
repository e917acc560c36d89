"""Laws of the control unit's share of generation: no token reaches another text, no text waits in
vain.

The other end of the link is scripted, so that frames come exactly as late as a test needs them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import LinkError, LinkTimeout, ModelError
from collapipe_flwr.pipeline import generation_driver as driver_module
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.generation import ASK, DONE, PROMPT, TOKENS
from collapipe_flwr.pipeline.generation_driver import GenerationDriver, TextTimeout
from collapipe_flwr.pipeline.link import Frame, FrameKind, MemoryLink, make_memory_pair
from tests.pipeline.chains import DEADLINE_S
from tests.threads import none_left

SETTINGS = StageConfig(name="control unit", deadline_s=DEADLINE_S, idle_s=2 * DEADLINE_S)
IDS = torch.tensor([[3, 4]])
Answer = Callable[[Frame], Iterable[Frame]]


class Table(nn.Module):
    """An embedding of one number; of negative ids there is none."""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        if int(inputs["input_ids"].min()) < 0:
            raise IndexError("index out of range in self")
        return inputs["input_ids"][..., None].float()


def tokens(text: int, *ids: int, **scalars: float) -> Frame:
    tensors = {TOKENS: torch.tensor(ids)}
    return Frame(kind=FrameKind.TOKENS, micro_batch=text, tensors=tensors, scalars=scalars)


@dataclass
class Chain:
    """A driver, and all that came down to the scripted end of its link."""

    driver: GenerationDriver
    far: MemoryLink
    came: list[Frame] = field(default_factory=list)

    def begin(self, ids: Tensor = IDS) -> Any:
        return self.driver.generate(ids, "{}")

    def text(self) -> list[int]:
        return [token for piece in self.begin() for token in piece.tolist()]

    def lose_patience(self) -> None:
        """From now on nothing is waited for."""
        self.driver._settings = replace(SETTINGS, deadline_s=0.01)

    def kinds(self) -> list[FrameKind]:
        return [frame.kind for frame in self.came]


@contextmanager
def chain(answer: Answer, *, slots: int = 1, cached: bool = True) -> Iterator[Chain]:
    near, far = make_memory_pair("control unit", "device")
    found = Chain(GenerationDriver(Table(), near, SETTINGS, cached=cached, slots=slots), far)

    def serve() -> None:
        try:
            while (frame := far.receive(deadline_s=DEADLINE_S)).kind is not FrameKind.END:
                found.came.append(frame)
                for reply in answer(frame):
                    far.send(reply, deadline_s=DEADLINE_S)
            far.send(frame, deadline_s=DEADLINE_S)
        except LinkError:
            return  # the driver gave the chain up, or the test did

    thread = threading.Thread(target=serve)
    with none_left():
        thread.start()
        try:
            yield found
        finally:
            near.close()
            thread.join(DEADLINE_S)


def test_tokens_that_come_late_reach_no_other_text() -> None:
    begun: list[int] = []

    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.STOP:
            yield tokens(frame.micro_batch, **{DONE: 1.0})
        elif PROMPT in frame.scalars:
            begun.append(frame.micro_batch)
            if len(begun) == 1:
                yield tokens(frame.micro_batch, 1)
            else:
                yield tokens(begun[0], 66)
                yield tokens(begun[0], 66, **{ASK: 1.0})
                yield tokens(frame.micro_batch, 2)
                yield tokens(begun[0], 66, 67, **{DONE: 1.0})
                yield tokens(frame.micro_batch, 2, 3, **{DONE: 1.0})

    with chain(answer) as made:
        first = made.begin()
        assert next(first).tolist() == [1]
        first.close()
        assert made.text() == [2, 3]
        made.driver.finish()
    assert len(set(begun)) == 2


def test_no_two_texts_of_a_chain_have_the_same_number() -> None:
    begun: list[int] = []

    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.ACTIVATION:
            begun.append(frame.micro_batch)
            yield tokens(frame.micro_batch, 5, **{DONE: 1.0})

    with chain(answer, slots=3) as made:
        for _ in range(10):
            assert made.text() == [5]
    assert len(set(begun)) == 10


def test_a_stop_that_is_not_answered_ends_the_chain_for_everyone() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.ACTIVATION:
            yield tokens(frame.micro_batch, 1)

    with chain(answer, slots=3) as made:
        left, other = made.begin(), made.begin()
        assert [next(left).tolist(), next(other).tolist()] == [[1], [1]]
        made.lose_patience()
        left.close()
        with pytest.raises(LinkError, match="did not stop text 0 within"):
            next(other)
        with pytest.raises(LinkError, match="did not stop text 0 within"):
            made.text()
        with pytest.raises(LinkError, match=r"control unit failed: .* did not stop text 0"):
            made.far.receive(deadline_s=DEADLINE_S)


def test_a_token_that_does_not_come_ends_the_chain_without_a_second_wait() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.ACTIVATION:
            yield tokens(frame.micro_batch, 1)

    with chain(answer) as made:
        text = made.begin()
        next(text)
        made.lose_patience()
        with pytest.raises(LinkTimeout, match="sent nothing within"):
            next(text)
        assert FrameKind.STOP not in made.kinds()
        with pytest.raises(LinkError, match="sent nothing within"):
            made.text()


def test_who_waits_for_a_slot_hears_that_the_chain_broke() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.ACTIVATION:
            yield tokens(frame.micro_batch, 1)

    heard: list[LinkError] = []

    def wait(made: Chain) -> None:
        try:
            made.text()
        except LinkError as error:
            heard.append(error)

    with chain(answer) as made:
        first = made.begin()
        next(first)
        waiting = threading.Thread(target=wait, args=(made,))
        waiting.start()
        made.far.close("board on fire")
        waiting.join(DEADLINE_S / 2)
        assert not waiting.is_alive()
        assert "board on fire" in str(heard[0]) and not isinstance(heard[0], TextTimeout)
        first.close()


def test_a_reader_that_stays_behind_loses_its_own_text_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "_CAPACITY", 4)

    def answer(frame: Frame) -> Iterator[Frame]:
        number = frame.micro_batch
        if frame.kind is FrameKind.STOP:
            yield tokens(number, **{DONE: 1.0})
        elif number == 0:
            yield tokens(number, 0)
        else:
            yield from (tokens(0, token) for token in range(1, 8))
            yield tokens(number, 9, **{DONE: 1.0})

    with chain(answer, slots=2) as made:
        slow = made.begin()
        assert next(slow).tolist() == [0]
        assert made.text() == [9]  # behind all eight
        with pytest.raises(TextTimeout, match="4 pieces of the text lay unread"):
            list(slow)
        assert [made.text() for _ in range(3)] == [[9]] * 3  # in both slots
        made.driver.finish()


def test_a_text_that_is_complete_is_not_stopped() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.ACTIVATION:
            yield tokens(frame.micro_batch, 1)
            yield tokens(frame.micro_batch, 1, 2, **{DONE: 1.0})

    with chain(answer, slots=2) as made:
        first = made.begin()
        next(first)
        assert made.text() == [1, 2]  # behind the end of the first
        first.close()
        assert [made.text() for _ in range(3)] == [[1, 2]] * 3  # in both slots
        assert FrameKind.STOP not in made.kinds()


def test_another_thread_may_close_a_text() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        last = {DONE: 1.0} if frame.kind is FrameKind.STOP else {}
        yield tokens(frame.micro_batch, 1, **last)

    with chain(answer) as made:
        text = made.begin()
        next(text)
        closing = threading.Thread(target=text.close)
        closing.start()
        closing.join(DEADLINE_S)
        assert next(made.begin()).tolist() == [1]


def test_a_prompt_that_cannot_be_embedded_leaves_the_chain_in_order() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.ACTIVATION:
            yield tokens(frame.micro_batch, 1, **{DONE: 1.0})

    with chain(answer) as made:
        with pytest.raises(IndexError):
            list(made.begin(-IDS))
        assert made.text() == [1]
        assert FrameKind.STOP not in made.kinds()


def test_a_refused_text_is_a_fault_of_the_text_a_late_one_is_not() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        if frame.kind is FrameKind.ACTIVATION:
            late = {"late": 1.0} if frame.micro_batch else {}
            yield replace(tokens(frame.micro_batch, **{DONE: 1.0, **late}), text="no")

    with chain(answer) as made:
        with pytest.raises(ModelError, match="no"):
            made.text()
        with pytest.raises(TextTimeout, match="no"):
            made.text()


def test_a_chain_that_has_ended_says_so() -> None:
    with chain(lambda _: ()) as made:
        made.driver.finish()
        with pytest.raises(LinkError, match="the chain has ended"):
            made.text()


def test_an_idle_chain_ends_with_the_true_reason() -> None:
    near, far = make_memory_pair("control unit", "device")
    settings = replace(SETTINGS, deadline_s=0.05, idle_s=0.05)
    driver = GenerationDriver(Table(), near, settings, cached=True, slots=1)
    driver._reader.join(DEADLINE_S)
    with pytest.raises(LinkError, match=r"no text was asked for within 0\.05 s"):
        list(driver.generate(IDS, "{}"))
    with pytest.raises(LinkError, match=r"control unit failed: no text was asked for"):
        far.receive(deadline_s=DEADLINE_S)


def test_what_is_no_token_breaks_the_chain() -> None:
    def answer(frame: Frame) -> Iterator[Frame]:
        yield Frame(kind=FrameKind.STOP, micro_batch=frame.micro_batch)

    with chain(answer) as made, pytest.raises(LinkError, match="device sent STOP while generating"):
        made.text()
