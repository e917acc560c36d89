"""Laws of a session's life: who has the part, who ends whom, and what a failure leaves behind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from collapipe_flwr.core.errors import LinkError, ModelError
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.host.session import Snapshot
from collapipe_flwr.host.stores import SnapshotStore
from collapipe_flwr.pipeline.link import Frame, FrameKind, MemoryLink, memory_pair
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.state import PartState
from tests.host.chain_to_edge import build_head, request, service, session_key
from tests.pipeline.chains import Head

ADAMW = OptimizerConfig(name="adamw")
SLOTS = {key: (torch.ones(()), p, p) for key, p in Head().state_dict().items()}


def opened(edge: EdgeService, session_id: str = "c1", **options: object) -> EdgeService:
    edge.open(request(session_id, optimizer=ADAMW, **options))
    edge.push_weights(session_key(session_id), Head().state_dict())
    return edge


def told_to_end() -> MemoryLink:
    """The link of a stream that ends as soon as it begins."""
    ours, theirs = memory_pair("edge", "device")
    theirs.send(Frame(kind=FrameKind.END), deadline_s=1)
    return ours


@pytest.mark.parametrize("recoverable", [True, False])
def test_a_claimed_stream_does_not_run_once_its_session_was_closed(recoverable):
    edge = opened(service(), recoverable=recoverable)
    stream = edge.claim(session_key())
    edge.close(session_key())
    ours, theirs = memory_pair("edge", "device")
    theirs.send(Frame(kind=FrameKind.END), deadline_s=1)
    with pytest.raises(LinkError, match="the session was closed"):
        edge.serve(stream, ours)
    with pytest.raises(LinkError, match="the session was closed"):
        theirs.receive(deadline_s=1)
    assert edge.health().sessions == 0


def test_a_claimed_stream_does_not_run_once_its_session_was_rolled_back():
    edge = opened(service(), recoverable=True)
    late = edge.claim(session_key())
    edge.rollback(session_key(), 0)
    edge.serve(edge.claim(session_key()), told_to_end())
    claimed = edge.claim(session_key())
    with pytest.raises(LinkError, match="rolled back"):
        edge.serve(late, told_to_end())
    edge.serve(claimed, told_to_end())
    assert edge.health().running == 0


def test_a_claim_that_is_given_up_leaves_the_session_at_rest():
    edge = opened(service())
    stream = edge.claim(session_key())
    edge.release(stream)
    edge.serve(edge.claim(session_key()), told_to_end())
    edge.release(stream)
    assert edge.health().running == 0


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

    edge = EdgeService(build)
    edge.open(request("old", blocks=(0, 1)))
    push = lambda: edge.push_weights(session_key("old"), Head().state_dict())  # noqa: E731
    with in_thread(push) as pushed:
        gate.entered.wait(60)
        edge.open(request("new", blocks=(1, 2)))
        assert edge.health().sessions == 2
        gate.opened.set()
    assert pushed == [None]
    assert edge.weights(session_key("old"))


def test_an_id_is_free_again_only_when_its_last_session_has_ended(tmp_path: Path):
    gate = Authorizer()

    class Slow(Head):
        def parameters(self, recurse: bool = True):
            gate.wait()  # the stage asks for them when it begins
            return super().parameters(recurse)

    edge = opened(EdgeService(build_head, snapshots=SnapshotStore(tmp_path)))
    edge.find(session_key()).part = Slow()
    stream = edge.claim(session_key())
    ours, theirs = memory_pair("edge", "device")
    with (
        in_thread(lambda: edge.serve(stream, ours)),
        in_thread(lambda: edge.close(session_key())),
    ):
        gate.entered.wait(60)
        with pytest.raises(LinkError):
            theirs.receive(deadline_s=60)  # closed, but its stage has not noticed
        with pytest.raises(LinkError, match="open already"):
            edge.open(request("c1", recoverable=True))
        gate.opened.set()
    opened(edge, recoverable=True)
    assert len(list(tmp_path.iterdir())) == 1


class PausedThread(threading.Thread):
    """Stops before line number `at` of those that it executes in the files of sessions."""

    def __init__(self, call: Callable[[], object], at: int) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.paused = False
        self._call, self._at, self._lines = call, at, 0

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
            if self._lines == self._at:
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
    edge, at = opened(service(), recoverable=True), 0
    first = PausedThread(lambda: None, 0)
    while first.paused or not at:
        at += 1
        stream = edge.claim(session_key())
        first = PausedThread(partial(edge.serve, stream, told_to_end()), at)
        _break_off_the_second(edge, first)
    assert at > 10


def _break_off_the_second(edge: EdgeService, first: PausedThread) -> None:
    link, peer = memory_pair("edge", "device")
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
        edge.rollback(session_key(), 0)
        with pytest.raises(LinkError, match="rolled back"):
            peer.receive(deadline_s=60)
    assert "rolled back" in str(served[0])


# -- what a push that fails leaves behind ---------------------------------------------------------


def _whole() -> dict[str, torch.Tensor]:
    return dict(PartState(weights=Head().state_dict(), optimizer=SLOTS).tensors())


@pytest.mark.parametrize("recoverable", [True, False])
@pytest.mark.parametrize(
    "slot",
    [
        {"optimizer/1/out.weight": torch.ones(3)},
        {"optimizer/1/out.weight": SLOTS["out.weight"][1].double()},
        {"optimizer/7/out.weight": torch.ones(())},
        {"out.bias": torch.ones(1)},
    ],
)
def test_a_push_with_one_bad_tensor_changes_nothing(slot, recoverable):
    edge = service()
    edge.open(request(optimizer=ADAMW, recoverable=recoverable))
    bad = {**_whole(), **slot}
    with pytest.raises((ModelError, RuntimeError)):
        edge.push_weights(session_key(), bad)
    with pytest.raises(LinkError, match="push them first"):
        edge.weights(session_key())
    good = _whole()
    edge.push_weights(session_key(), good)
    with pytest.raises((ModelError, RuntimeError)):
        edge.push_weights(session_key(), bad)
    found = edge.weights(session_key(), with_optimizer=True)
    assert found.keys() == good.keys()
    assert all(torch.equal(found[key], good[key]) for key in good)


class FullDisk(SnapshotStore):
    """Writes nothing while `full`."""

    full = False

    def write(self, kept: Snapshot) -> None:
        if self.full:
            raise OSError("no space left")
        super().write(kept)


def test_a_push_that_cannot_be_kept_on_disk_changes_nothing(tmp_path: Path):
    store = FullDisk(tmp_path)
    edge = EdgeService(build_head, snapshots=store)
    edge.open(request(optimizer=ADAMW, recoverable=True))
    store.full = True
    with pytest.raises(OSError, match="no space"):
        edge.push_weights(session_key(), Head().state_dict())
    with pytest.raises(LinkError, match="push them first"):
        edge.weights(session_key())
    store.full = False
    first = _whole()
    edge.push_weights(session_key(), first)
    store.full = True
    with pytest.raises(OSError, match="no space"):
        edge.push_weights(session_key(), Head().state_dict())
    for host in (edge, EdgeService(build_head, snapshots=SnapshotStore(tmp_path))):
        host.rollback(session_key(), 0)
        found = host.weights(session_key(), with_optimizer=True)
        assert all(torch.equal(found[key], first[key]) for key in first)


def test_a_snapshot_that_cannot_be_kept_on_disk_leaves_the_last_one_in_force(tmp_path: Path):
    store = FullDisk(tmp_path)
    edge = opened(EdgeService(build_head, snapshots=store), recoverable=True)
    before = edge.weights(session_key())
    session = edge.find(session_key())
    session.steps = 2  # as if a stream had done them
    session.part.out.bias.data.add_(1)
    store.full = True
    with pytest.raises(OSError, match="no space"):
        edge.snapshot(session_key(), 2)
    edge.rollback(session_key(), 0)
    after = edge.weights(session_key())
    assert all(torch.equal(after[key], before[key]) for key in before)
