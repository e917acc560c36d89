"""Sessions whose stream comes before their weights: it waits for them, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from collapipe_flwr.core.errors import CollaPipeError, LinkError, ModelError
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.host.session import Lane, SessionRefused
from collapipe_flwr.pipeline.link import MemoryLink, memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage
from tests.host.chain_to_edge import request, service, session_key
from tests.pipeline.chains import SGD, Head, make_batch, make_parts, settings

WAIT_S, SHORT_S = 60.0, 0.2
KEY = session_key()


@contextmanager
def streaming(
    host: EdgeService, errors: list[Exception]
) -> Iterator[tuple[MemoryLink, threading.Thread]]:
    """A claimed stream, which a thread runs; the control unit's end of its link."""
    ours, theirs = memory_pair("control unit", "edge")
    stream = host.claim(KEY)

    def serve() -> None:
        try:
            host.serve(stream, theirs)
        except CollaPipeError as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ours, thread
    finally:
        ours.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def opened(**options: object) -> EdgeService:
    host = service()
    host.open(request(overlap=True, **options))
    return host


def train(link: MemoryLink, *, last: bool = True) -> float:
    part = make_parts((1,))[0]
    optimizer = Optimizer(SGD, part.named_parameters())
    first = FirstStage(part, optimizer, settings("control unit"), downstream=link)
    loss = first.train_step(make_batch((2, 1)), last=last).loss
    first.finish()
    return loss


def test_a_stream_waits_for_weights_and_runs() -> None:
    head, errors = Head(), list[Exception]()
    host = opened()
    losses = []
    with streaming(host, errors) as (link, _):
        trainer = threading.Thread(target=lambda: losses.append(train(link)))
        trainer.start()
        assert not host.missing(KEY, {})
        host.push_weights(KEY, head.state_dict())
        trainer.join(WAIT_S)
    assert not errors
    assert len(losses) == 1
    assert host.ended(KEY)
    assert host.report(KEY).steps == 1
    moved = host.weights(KEY)
    assert any(not torch.equal(moved[key], value) for key, value in head.state_dict().items())


def test_one_stream_only_waits_for_the_weights_and_trains() -> None:
    host, errors = opened(), list[Exception]()
    with streaming(host, errors) as (link, _):
        with pytest.raises(SessionRefused, match="another stream waits"):
            host.claim(KEY)
        host.push_weights(KEY, Head().state_dict())
        assert train(link) > 0
    assert not errors
    assert host.report(KEY).steps == 1


def test_lanes_of_a_stream_that_waits_are_claimed_once_each() -> None:
    host = opened()
    stream = host.claim(KEY, Lane(0, 2))
    with pytest.raises(SessionRefused, match="another stream waits"):
        host.claim(KEY, Lane(0, 2))
    assert host.claim(KEY, Lane(1, 2)) is stream
    host.release(stream)
    assert host.claim(KEY) is not stream  # after one that was given up there may be another


def test_weights_that_do_not_fit_leave_it_waiting_for_others() -> None:
    host, errors = opened(), list[Exception]()
    with streaming(host, errors) as (link, _):
        with pytest.raises((ModelError, RuntimeError)):
            host.push_weights(KEY, {})
        host.push_weights(KEY, Head().state_dict())
        assert train(link) > 0
    assert not errors


def test_without_overlap_a_stream_needs_weights_first() -> None:
    host = service()
    host.open(request())
    with pytest.raises(SessionRefused, match="no weights yet: push them first"):
        host.claim(KEY)


def test_a_running_stream_takes_no_weights() -> None:
    host, errors = opened(), list[Exception]()
    with streaming(host, errors) as (link, _):
        host.push_weights(KEY, Head().state_dict())
        train(link)
        assert host.ended(KEY)
        host.push_weights(KEY, Head().state_dict())
    assert not errors
    with streaming(host, errors), pytest.raises(SessionRefused, match="middle of a stream"):
        host.push_weights(KEY, Head().state_dict())


def test_weights_that_never_come_end_the_stream() -> None:
    host, errors = opened(deadline_s=SHORT_S, idle_s=SHORT_S), list[Exception]()
    with streaming(host, errors) as (link, thread):
        thread.join(WAIT_S)
        with pytest.raises(LinkError, match=r"no weights came within 0\.2 s"):
            link.receive(deadline_s=WAIT_S)
    assert [type(error) for error in errors] == [SessionRefused]
    host.push_weights(KEY, Head().state_dict())
    assert host.weights(KEY)  # the session goes on


ENDS: dict[str, Callable[[EdgeService], object]] = {
    "closed": lambda host: host.close(KEY),
    "cut": lambda host: host.break_off("the host is stopping"),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_stream_that_waits_ends_at_once(how: str) -> None:
    host, errors = opened(), list[Exception]()
    with streaming(host, errors) as (link, thread):
        ENDS[how](host)
        thread.join(WAIT_S)
        with pytest.raises(LinkError, match=r"session was closed|host is stopping"):
            link.receive(deadline_s=WAIT_S)
    assert [type(error) for error in errors] == [SessionRefused]
    assert host.health().sessions == (how == "cut")


def test_who_waits_for_its_end_hears_of_it_and_of_a_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe_flwr.host.service.ENDED_S", SHORT_S)
    host = opened()
    assert not host.ended(KEY), "it has not even begun"
    monkeypatch.setattr("collapipe_flwr.host.service.ENDED_S", WAIT_S)
    errors, told = list[Exception](), list[bool | Exception]()

    def wait() -> None:
        try:
            told.append(host.ended(KEY))
        except SessionRefused as error:
            told.append(error)

    with streaming(host, errors) as (link, _):
        waiting = threading.Thread(target=wait)
        waiting.start()
        host.push_weights(KEY, Head().state_dict())
        train(link)
        waiting.join(WAIT_S)
    assert told == [True]
    host.push_weights(KEY, Head().state_dict())
    waiting = threading.Thread(target=wait)
    waiting.start()
    host.close(KEY)
    waiting.join(WAIT_S)
    assert isinstance(told[1], SessionRefused)
