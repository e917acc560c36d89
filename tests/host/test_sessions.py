"""Laws of a session's life: who has the part, who ends whom, and what a failure leaves behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from collapipe_flwr.core.errors import LinkError, ModelError
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.link import Frame, FrameKind, MemoryLink, make_memory_pair
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.state import PartState
from tests.host.chain_to_edge import build_head, request, service, session_key
from tests.pipeline.chains import Head

ADAMW = OptimizerConfig(name="adamw")
SLOTS = {key: (torch.ones(()), p, p) for key, p in Head().state_dict().items()}


def opened(edge: HostService, session_id: str = "c1", **options: object) -> HostService:
    edge.open(request(session_id, optimizer=ADAMW, **options))
    edge.push_weights(session_key(session_id), Head().state_dict())
    return edge


def told_to_end() -> MemoryLink:
    """The link of a stream that ends as soon as it begins."""
    ours, theirs = make_memory_pair("edge", "device")
    theirs.send(Frame(kind=FrameKind.END), deadline_s=1)
    return ours


def test_a_claimed_stream_does_not_run_once_its_session_was_closed():
    edge = opened(service())
    stream = edge.claim(session_key())
    edge.close(session_key())
    ours, theirs = make_memory_pair("edge", "device")
    theirs.send(Frame(kind=FrameKind.END), deadline_s=1)
    with pytest.raises(LinkError, match="the session was closed"):
        edge.serve(stream, ours)
    with pytest.raises(LinkError, match="the session was closed"):
        theirs.receive(deadline_s=1)
    assert edge.measure_load().sessions == 0


def test_a_claim_that_is_given_up_leaves_the_session_at_rest():
    edge = opened(service())
    stream = edge.claim(session_key())
    edge.release(stream)
    edge.serve(edge.claim(session_key()), told_to_end())
    edge.release(stream)
    assert edge.measure_load().running == 0


class Authorizer:
    """Where a part waits; `entered` is set when somebody has come."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.opened.wait(60)


@contextmanager
def in_thread(call: Callable[[], object]) -> Iterator[list[object]]:
    """Run beside the body, then wait for the end; what was returned or raised."""
    done: list[object] = []

    def run() -> None:
        try:
            done.append(call())
        except LinkError as error:
            done.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        thread.join(60)
        assert not thread.is_alive()


def test_a_session_whose_push_is_under_way_is_not_displaced():
    gate = Authorizer()

    def build(asked, weights):
        if asked.key.session_id == "old":
            gate.wait()
        return build_head(asked, weights)

    edge = HostService(build)
    edge.open(request("old", blocks=(0, 1)))
    push = lambda: edge.push_weights(session_key("old"), Head().state_dict())  # noqa: E731
    with in_thread(push) as pushed:
        gate.entered.wait(60)
        edge.open(request("new", blocks=(1, 2)))
        assert edge.measure_load().sessions == 2
        gate.opened.set()
    assert pushed == [None]
    assert edge.copy_weights(session_key("old"))


def test_an_id_is_free_again_only_when_its_last_session_has_ended():
    gate = Authorizer()

    class Slow(Head):
        def parameters(self, recurse: bool = True):
            gate.wait()  # the stage asks for them when it begins
            return super().parameters(recurse)

    edge = opened(service())
    edge.find(session_key()).part = Slow()
    stream = edge.claim(session_key())
    ours, theirs = make_memory_pair("edge", "device")
    with (
        in_thread(lambda: edge.serve(stream, ours)),
        in_thread(lambda: edge.close(session_key())),
    ):
        gate.entered.wait(60)
        with pytest.raises(LinkError):
            theirs.receive(deadline_s=60)  # closed, but its stage has not noticed
        with pytest.raises(LinkError, match="open already"):
            edge.open(request("c1"))
        gate.opened.set()
    opened(edge)


class PausedThread(threading.Thread):
    """Stops before line number `at` of those that it executes in the files of sessions."""

    def __init__(self, call: Callable[[], object], at: int) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.paused = False
        self._call, self._find_worker, self._lines = call, at, 0

    def run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._call()
        finally:
            sys.settrace(None)
            self.reached.set()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("host/session.py", "host/sessions.py")):
            return None
        if event == "line":
            self._lines += 1
            if self._lines == self._find_worker:
                self.paused = True
                self.reached.set()
                assert self.go_on.wait(60)
        return self._trace


class NoticedLink:
    """A link that says when a stage waits at it."""

    def __init__(self, link: MemoryLink, *noticed: threading.Event) -> None:
        self._link, self._noticed = link, noticed

    def receive(self, *, deadline_s: float) -> Frame:
        for event in self._noticed:
            event.set()
        return self._link.receive(deadline_s=deadline_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


def test_the_end_of_a_stream_leaves_the_next_one_its_links():
    """A second stream comes while the first one stands before any line of its life."""
    edge, at = opened(service()), 0
    first = PausedThread(lambda: None, 0)
    while first.paused or not at:
        at += 1
        stream = edge.claim(session_key())
        first = PausedThread(partial(edge.serve, stream, told_to_end()), at)
        _break_off_the_second(edge, first)
    assert at > 10


def _break_off_the_second(edge: HostService, first: PausedThread) -> None:
    link, peer = make_memory_pair("edge", "device")
    settled, runs = threading.Event(), threading.Event()

    def second() -> None:
        try:
            stream = edge.claim(session_key())
        except LinkError:  # the first one has it
            settled.set()
            first.join(60)
            stream = edge.claim(session_key())
        edge.serve(stream, NoticedLink(link, settled, runs))

    first.start()
    assert first.reached.wait(60)
    with in_thread(second) as served:
        settled.wait(0.05)  # the first one may hold the lock that the second one waits for
        first.go_on.set()
        first.join(60)
        assert runs.wait(60)
        edge.break_off("for the next round")
        with pytest.raises(LinkError, match="for the next round"):
            peer.receive(deadline_s=60)
    assert "for the next round" in str(served[0])
    opened(edge)


# -- what a push that fails leaves behind ---------------------------------------------------------


def _whole() -> dict[str, torch.Tensor]:
    return dict(PartState(weights=Head().state_dict(), optimizer=SLOTS).flatten())


@pytest.mark.parametrize(
    "slot",
    [
        {"optimizer/1/out.weight": torch.ones(3)},
        {"optimizer/1/out.weight": SLOTS["out.weight"][1].double()},
        {"optimizer/7/out.weight": torch.ones(())},
        {"out.bias": torch.ones(1)},
    ],
)
def test_a_push_with_one_bad_tensor_changes_nothing(slot):
    edge = service()
    edge.open(request(optimizer=ADAMW))
    bad = {**_whole(), **slot}
    with pytest.raises((ModelError, RuntimeError)):
        edge.push_weights(session_key(), bad)
    with pytest.raises(LinkError, match="push them first"):
        edge.copy_weights(session_key())
    good = _whole()
    edge.push_weights(session_key(), good)
    with pytest.raises((ModelError, RuntimeError)):
        edge.push_weights(session_key(), bad)
    found = edge.copy_weights(session_key(), with_optimizer=True)
    assert found.keys() == good.keys()
    assert all(torch.equal(found[key], good[key]) for key in good)
