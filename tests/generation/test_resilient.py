"""Law: a chain that breaks in the middle of a text is mended, and the text stays the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.generation.backends import make_thread_backend
from collapipe_flwr.generation.resilient import MOST_REPLAYS, GenerationBackend, ResilientGenerator
from collapipe_flwr.models.parts import SegmentPart
from collapipe_flwr.pipeline.generation import GeneratingEdge
from collapipe_flwr.pipeline.generation_driver import GenerationDriver
from collapipe_flwr.pipeline.link import Frame, FrameKind
from tests.generation.test_backends import PROMPTS, Case, served
from tests.threads import none_left

PROMPT = torch.tensor([PROMPTS[0]])


@pytest.fixture(scope="module")
def case() -> Case:
    return Case("llama")


def site(case: Case, devices: int = 3, slots: int = 3) -> GenerationBackend:
    return make_thread_backend(served(case, slots), devices)


def written(chain: ResilientGenerator, prompt: list[int], settings: str) -> list[int]:
    pieces = chain.generate(torch.tensor([prompt]), settings)
    return [token for piece in pieces for token in piece.tolist()]


def once(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """A device's blocks break down, once, ``after`` so many calls."""
    whole, left = SegmentPart.advance, [after]

    def advance(self: SegmentPart, *arguments: Any) -> Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("board on fire")
        return whole(self, *arguments)

    monkeypatch.setattr(SegmentPart, "advance", advance)


@pytest.mark.parametrize("changes", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 5}])
def test_the_rest_of_the_devices_write_the_same_text(
    case: Case, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    settings = case.settings(**changes)
    with none_left(), ResilientGenerator(site(case)) as chain:
        undisturbed = written(chain, PROMPTS[0], settings)
    ours = site(case)
    with none_left(), ResilientGenerator(ours) as chain:
        once(monkeypatch, after=14)
        assert written(chain, PROMPTS[0], settings) == undisturbed
        assert len(ours.missing(ours.device_ids)) == 1


def test_every_text_in_the_making_goes_on(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResilientGenerator(site(case)) as chain, ThreadPoolExecutor(3) as pool:
        once(monkeypatch, after=20)
        found = list(pool.map(lambda p: written(chain, p, case.settings()), PROMPTS))
    assert found == [case.unsplit(prompt) for prompt in PROMPTS]


def test_without_any_device_it_is_one_sentence(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with ResilientGenerator(site(case, devices=1)) as chain:
        once(monkeypatch, after=4)
        with pytest.raises(LinkError, match=r"no device of the cluster .*on fire"):
            written(chain, PROMPTS[0], case.settings())


@dataclass
class _Flaky:
    """A site whose chains break at the n-th token, though all devices answer."""

    inner: GenerationBackend
    breaks: Callable[[], bool]
    device_ids: tuple[str, ...] = ("device-1", "device-2")
    chains: list[tuple[str, ...]] = field(default_factory=list)

    @contextmanager
    def chain(self, device_ids: Any) -> Iterator[GenerationDriver]:
        self.chains.append(tuple(device_ids))
        with self.inner.chain(device_ids) as driver:
            whole = driver.generate

            def generate(prompt: Tensor, settings_json: str) -> Iterator[Tensor]:
                for number, piece in enumerate(whole(prompt, settings_json)):
                    if number == 2 and self.breaks():
                        raise LinkError("the cable is loose")
                    yield piece

            driver.generate = generate  # type: ignore[method-assign, assignment]
            yield driver

    def missing(self, device_ids: Any) -> frozenset[str]:
        return frozenset(device_ids).difference(self.device_ids)


def test_a_chain_that_breaks_for_no_reason_is_tried_again(case: Case) -> None:
    left = [True] * MOST_REPLAYS
    flaky = _Flaky(site(case, devices=2), breaks=lambda: bool(left) and left.pop())
    with ResilientGenerator(flaky) as chain:
        assert written(chain, PROMPTS[0], case.settings()) == case.unsplit(PROMPTS[0])
    assert flaky.chains == [flaky.device_ids] * (MOST_REPLAYS + 1)


def test_but_not_for_ever(case: Case) -> None:
    always = _Flaky(site(case, devices=2), breaks=lambda: True)
    with (
        ResilientGenerator(always) as chain,
        pytest.raises(LinkError, match="the cable is loose"),
    ):
        written(chain, PROMPTS[0], case.settings())
    assert len(always.chains) == MOST_REPLAYS + 1


def test_texts_that_fail_together_end_together(case: Case) -> None:
    """Whoever of them notices first: each counts what it went through itself."""
    always = _Flaky(site(case, devices=2, slots=2), breaks=lambda: True)
    with ResilientGenerator(always) as chain, ThreadPoolExecutor(2) as pool:
        texts = [pool.submit(written, chain, prompt, case.settings()) for prompt in PROMPTS[:2]]
        for text in texts:
            with pytest.raises(LinkError):
                text.result(120)
    assert len(always.chains) <= 2 * (MOST_REPLAYS + 1)


def test_a_chain_whose_edge_does_not_stop_a_text_is_built_anew(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other texts on it are written to their end, and none reads a token of another."""
    accept = GeneratingEdge._accept

    def deaf(self: GeneratingEdge, frame: Frame, pool: Any) -> None:
        if frame.kind is not FrameKind.STOP:
            accept(self, frame, pool)

    monkeypatch.setattr(GeneratingEdge, "_accept", deaf)
    with none_left(), ResilientGenerator(site(case, slots=2)) as chain:
        other = chain.generate(torch.tensor([PROMPTS[1]]), case.settings())
        left = chain.generate(PROMPT, case.settings())
        found = next(other).tolist()
        next(left)
        first = chain._running
        assert first is not None
        first.driver._settings = replace(first.driver._settings, deadline_s=0.01)
        left.close()
        found += [token for piece in other for token in piece.tolist()]
        assert found == case.unsplit(PROMPTS[1])
        assert written(chain, PROMPTS[0], case.settings()) == case.unsplit(PROMPTS[0])
        assert chain._running is not first


def _tokens(count: int) -> Iterator[Tensor]:
    yield from (torch.tensor([token]) for token in range(count))


@dataclass
class _Scripted:
    """A site without devices: each chain tells so many tokens and breaks, the last one goes on.

    ``away`` are the devices that do not answer after each of them.
    """

    told: list[int]
    away: list[set[str]]
    device_ids: tuple[str, ...] = ("a", "b", "c")
    chains: list[tuple[str, ...]] = field(default_factory=list)
    noticed: Callable[[], object] = bool  # called when a chain breaks, before the text hears of it

    @contextmanager
    def chain(self, device_ids: Any) -> Iterator[Any]:
        self.chains.append(tuple(device_ids))
        assert len(self.chains) < 50, "rebuilt without end"
        if len(self.chains) > len(self.told):
            yield _Driver(9)
        elif self.told[len(self.chains) - 1] < 0:
            raise LinkError("refused")
        else:
            yield _Driver(self.told[len(self.chains) - 1], breaks=self.noticed)

    def missing(self, device_ids: Any) -> frozenset[str]:
        away = self.away[(len(self.chains) - 1) % len(self.away)]
        return frozenset(away.intersection(device_ids))


@dataclass
class _Driver:
    tokens: int
    breaks: Callable[[], object] | None = None

    def generate(self, *_: Any) -> Iterator[Tensor]:
        yield from _tokens(self.tokens)
        if self.breaks is not None:
            self.breaks()
            raise LinkError("the cable is loose")


def test_a_break_counts_even_if_another_text_was_the_first_to_notice() -> None:
    scripted = _Scripted(told=[0] * 60, away=[set()])
    with ResilientGenerator(scripted) as chain:

        def notice() -> None:
            assert chain._running is not None
            chain._take_down(chain._running, LinkError("the cable is loose"))

        scripted.noticed = notice
        with pytest.raises(LinkError, match="cable is loose"):
            written(chain, PROMPTS[0], "")
    assert len(scripted.chains) == MOST_REPLAYS + 1


def test_a_text_that_gets_on_is_not_given_up() -> None:
    scripted = _Scripted(told=[1, 2, 2, 3, 3, 4], away=[set()])
    with ResilientGenerator(scripted) as chain:
        assert written(chain, PROMPTS[0], "") == list(range(9))
    assert len(scripted.chains) == 7


def test_a_text_that_does_not_get_on_is_given_up_however_much_it_told_before() -> None:
    scripted = _Scripted(told=[4, 0, 1, 4], away=[set()])
    with ResilientGenerator(scripted) as chain, pytest.raises(LinkError, match="cable is loose"):
        written(chain, PROMPTS[0], "")
    assert len(scripted.chains) == 3


def test_a_device_that_comes_and_goes_excuses_one_failure_only() -> None:
    scripted = _Scripted(told=[0] * 40, away=[{"a"}, set()])
    with ResilientGenerator(scripted) as chain, pytest.raises(LinkError, match="cable is loose"):
        written(chain, PROMPTS[0], "")
    assert len(scripted.chains) == 1 + MOST_REPLAYS + 1


def test_each_device_that_is_lost_excuses_a_failure() -> None:
    scripted = _Scripted(told=[0] * 4, away=[{"a"}, {"a"}, {"a", "b"}, {"a", "b"}])
    with ResilientGenerator(scripted) as chain:
        assert written(chain, PROMPTS[0], "") == list(range(9))
    assert scripted.chains[-1] == ("c",)


def test_devices_that_take_turns_to_be_away_end_the_building() -> None:
    scripted = _Scripted(told=[-1] * 40, away=[{"a"}, {"b"}])
    with pytest.raises(LinkError, match="refused"), ResilientGenerator(scripted):
        pass
    assert len(scripted.chains) == 3


def test_a_chain_that_was_taken_down_is_not_built_again() -> None:
    scripted = _Scripted(told=[], away=[set()])
    with ResilientGenerator(scripted) as chain:
        text = chain.generate(PROMPT, "")
        next(text)
    assert [token for piece in text for token in piece.tolist()] == list(range(1, 9))
    with pytest.raises(LinkError, match="was taken down"):
        written(chain, PROMPTS[0], "")
    assert len(scripted.chains) == 1
