"""The gateway over a real edge server on loopback: the same contract as the in-memory one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.federation.rpc_gateway import RpcEdgeGateway
from collapipe_flwr.federation.split import EdgeGateway
from collapipe_flwr.host.server import EdgeServer
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.host.stores import SnapshotStore
from collapipe_flwr.pipeline.config import SessionKey, SessionRequest
from collapipe_flwr.pipeline.state import PartState
from collapipe_flwr.transport.client import EdgeClient
from tests.federation.memory_edge import MemoryEdge


class Decoder(nn.Module):
    """Just enough of a last part to hold weights."""

    def __init__(self, weights) -> None:
        super().__init__()
        if set(weights) != {"w", "bias"}:
            raise LinkError("the decoder needs w and bias")
        self.w = nn.Parameter(weights["w"].clone())
        self.bias = nn.Parameter(weights["bias"].clone())

    def weight_of(self, context) -> int:
        del context
        return 1


@pytest.fixture(params=["memory", "rpc"])
def edge(request) -> Iterator[EdgeGateway]:
    if request.param == "memory":
        yield MemoryEdge()
        return
    service = EdgeService(lambda _, weights: Decoder(weights), most_sessions=2)
    with (
        EdgeServer("127.0.0.1:0", service) as server,
        EdgeClient(server.address, deadline_s=5.0) as client,
    ):
        yield RpcEdgeGateway(client)
        assert service.health().sessions == 0


def opened(
    edge: EdgeGateway, cluster_id: str, *, keeps: bool = False, **weights: torch.Tensor
) -> SessionKey:
    weights = weights or {"w": torch.arange(3.0), "bias": torch.ones(2, dtype=torch.bfloat16)}
    key = SessionKey.random(cluster_id)
    request = SessionRequest(key=key, spec_json="{}", cluster_id=cluster_id, recoverable=True)
    return edge.open(request, weights, keep_optimizer=keeps)


def test_what_is_placed_can_be_fetched_until_it_is_closed(edge):
    first, second = opened(edge, "c1"), opened(edge, "c2")
    assert first != second
    fetched = edge.fetch(first)
    assert fetched["w"].tolist() == [0.0, 1.0, 2.0]
    assert fetched["bias"].dtype == torch.bfloat16
    edge.close(first)
    with pytest.raises(LinkError):
        edge.fetch(first)
    edge.close(second)


@dataclass
class Slot:
    """One session of a `Shelf`."""

    held: dict[SessionKey, PartState]
    key: SessionKey

    def push_weights(self, tensors) -> None:
        self.held[self.key] = PartState.of_tensors(tensors)

    def fetch_weights(self, *, with_optimizer):
        held = self.held[self.key]
        return held.tensors() if with_optimizer else dict(held.weights)

    def close(self) -> None:
        del self.held[self.key]


class Shelf:
    """A client of an edge that keeps what is pushed; ``train`` is what its cluster does there."""

    address = "shelf"

    def __init__(self) -> None:
        self.held: dict[SessionKey, PartState] = {}

    def patiently(self, call):
        return call()

    def open_session(self, request) -> Slot:
        self.held[request.key] = PartState(weights={})
        return self.session(request.key)

    def session(self, key: SessionKey) -> Slot:
        return Slot(self.held, key)

    def train(self, session, momentum: float) -> list[float]:
        """Leave this momentum; returns that with which the session began."""
        held = self.held[session]
        slots = {"w": (torch.tensor([momentum]),)}
        self.held[session] = PartState(weights=held.weights, optimizer=slots)
        return [float(slot) for slots in held.optimizer.values() for slot in slots]


def test_a_decoder_continues_from_its_clusters_last_accepted_round():
    def play(gateway: RpcEdgeGateway, momentum: float, end: str, keeps: bool = True):
        session = opened(gateway, "c1", keeps=keeps)
        other = opened(gateway, "c2", keeps=keeps)
        began = shelf.train(session, momentum)
        assert shelf.train(other, 9.0) == []  # never accepted
        gateway.fetch(other)
        if end != "late":
            gateway.fetch(session)
        if end == "accepted":
            gateway.accept(session)
        for each in (session, other):
            gateway.close(each)
        return began

    shelf = Shelf()
    gateway = RpcEdgeGateway(shelf)
    ends = ["diverged", "accepted", "diverged", "late", "accepted"]
    began = [play(gateway, mark, end) for mark, end in enumerate(ends, start=1)]
    assert began == [[], [], [2.0], [2.0], [2.0]]
    resumed = RpcEdgeGateway(shelf)
    resumed.load(gateway.dump())
    assert play(resumed, 6.0, "diverged") == play(gateway, 6.0, "late") == [5.0]
    forgetful = RpcEdgeGateway(shelf)
    for momentum in (1.0, 2.0):
        assert play(forgetful, momentum, "accepted", keeps=False) == []
    assert shelf.held == {}


def test_the_token_is_not_printed(edge):
    session = opened(edge, "c1")
    assert session.token not in repr(session)
    edge.close(session)


def test_weights_that_the_edge_refuses_leave_no_session():
    service = EdgeService(lambda _, weights: Decoder(weights))
    with EdgeServer("127.0.0.1:0", service) as server, EdgeClient(server.address) as client:
        with pytest.raises(LinkError, match="needs w and bias"):
            opened(RpcEdgeGateway(client), "c1", w=torch.ones(1))
        assert service.health().sessions == 0


def test_an_edge_that_is_gone_is_one_sentence_in_bounded_time():
    with EdgeServer("127.0.0.1:0", EdgeService()) as server:
        address = server.address
    with (
        EdgeClient(address, deadline_s=3.0) as client,
        pytest.raises(LinkError, match=f"edge at {address} cannot be reached"),
    ):
        opened(RpcEdgeGateway(client), "c1")


class DyingEdge(EdgeService):
    """Keeps the weights of its first push, and dies before it can say so."""

    def __init__(self, store: SnapshotStore) -> None:
        super().__init__(lambda _, weights: Decoder(weights), snapshots=store)
        self.kept, self.stopped = threading.Event(), threading.Event()

    def receive_weights(self, *args, **kwargs) -> None:
        super().receive_weights(*args, **kwargs)
        self.kept.set()
        self.stopped.wait(60)  # the call is broken off meanwhile


def test_an_edge_that_restarts_while_a_session_is_opened_gets_it_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "collapipe_flwr.transport.server._END_S", 0.1
    )  # the push is still under way
    dying = DyingEdge(SnapshotStore(tmp_path))
    first = EdgeServer("127.0.0.1:0", dying)
    again: list[tuple[EdgeServer, EdgeService]] = []

    def restart() -> None:
        dying.kept.wait(200)
        first.stop(grace_s=0.0)
        dying.stopped.set()
        service = EdgeService(
            lambda _, weights: Decoder(weights), snapshots=SnapshotStore(tmp_path)
        )
        assert service.health().sessions == 1  # what nobody knows to be there
        again.append((EdgeServer(first.address, service), service))
        again[0][0].__enter__()

    with first:
        restarting = threading.Thread(target=restart)
        restarting.start()
        try:
            with EdgeClient(first.address, deadline_s=60.0, patience_s=200.0) as client:
                gateway = RpcEdgeGateway(client)
                session = opened(gateway, "c1")
                assert again[0][1].health().sessions == 1
                assert gateway.fetch(session)["w"].tolist() == [0.0, 1.0, 2.0]
                gateway.close(session)
                assert again[0][1].health().sessions == 0
        finally:
            restarting.join(200)
            for server, _ in again:
                server.stop()
