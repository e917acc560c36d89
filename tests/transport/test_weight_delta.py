"""What the other side holds does not travel, and what arrives is the same as if all had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from collapipe_flwr.core.measurements import TransferStats
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.host.stores import TensorStore
from collapipe_flwr.pipeline.offload import view_bytes
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.state import PartState, compute_digest
from collapipe_flwr.transport.client import HostClient
from tests.host.chain_to_edge import Cluster, build_head, request, session_key
from tests.pipeline.chains import Head, make_batch, make_parts

ADAMW = OptimizerConfig(name="adamw")


@pytest.fixture
def client() -> Iterator[HostClient]:
    service = HostService(build_head, store=TensorStore())
    with HostServer("127.0.0.1:0", service) as server, HostClient(server.address) as client:
        yield client


def _weights() -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in Head().state_dict().items()}


def _bytes(weights: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in weights.values())


def _push(client: HostClient, session_id: str, weights: dict[str, Tensor]) -> TransferStats:
    return client.open_session(request(session_id)).push_missing(weights)


def test_the_first_push_moves_everything_and_the_same_again_nothing(client: HostClient) -> None:
    weights = _weights()
    assert _push(client, "a", weights) == TransferStats(sent_bytes=_bytes(weights))
    client.get_session(session_key("a")).close()
    assert _push(client, "b", weights) == TransferStats(spared_bytes=_bytes(weights))
    found = client.get_session(session_key("b")).fetch_weights()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.parametrize("kept", [True, False])
def test_slots_that_were_kept_stay_where_they_are(client: HostClient, kept: bool) -> None:
    head = Head()
    slots = {key: (torch.ones(()), p, p) for key, p in head.state_dict().items()}
    state = PartState(weights=_weights(), optimizer=slots).flatten()
    for session_id in ("a", "b"):
        session = client.open_session(request(session_id, optimizer=ADAMW, keep_optimizer=kept))
        moved = session.push_missing(state)
        found = session.fetch_weights(with_optimizer=True)
        assert all(torch.equal(found[key], state[key]) for key in state)
        session.close()
    of_slots = _bytes(state) - _bytes(_weights())
    assert moved.sent_bytes == (0 if kept else of_slots)


def test_only_what_changed_moves(client: HostClient) -> None:
    weights = _weights()
    _push(client, "a", weights)
    client.get_session(session_key("a")).close()
    key = next(iter(weights))
    weights[key] = weights[key] + 1
    moved = _push(client, "b", weights)
    assert moved.sent_bytes == weights[key].numel() * weights[key].element_size()
    assert moved.spared_bytes == _bytes(weights) - moved.sent_bytes > 0
    found = client.get_session(session_key("b")).fetch_weights()
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def test_a_fetch_brings_only_what_training_changed(client: HostClient) -> None:
    weights = _weights()
    _push(client, "a", weights)
    fetched, moved = client.get_session(session_key("a")).fetch_changed(weights)
    assert moved == TransferStats(spared_bytes=_bytes(weights))
    assert all(torch.equal(fetched[key], weights[key]) for key in weights)
    key = next(iter(weights))
    known = {**weights, key: weights[key] + 1}
    fetched, moved = client.get_session(session_key("a")).fetch_changed(known)
    assert torch.equal(fetched[key], weights[key])
    assert moved.received_bytes == weights[key].numel() * weights[key].element_size()


@pytest.mark.parametrize("trains", [True, False])
def test_a_host_reads_nothing_again_that_training_has_changed(
    client: HostClient, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    read: list[Tensor] = []
    monkeypatch.setattr(
        "collapipe_flwr.pipeline.state.view_bytes", lambda t: (read.append(t), view_bytes(t))[1]
    )
    weights = _weights()
    session = client.open_session(request("a", optimizer=ADAMW, keep_optimizer=True))
    session.push_missing(weights)
    with Cluster(make_parts((1,)), session.stream()).running() as first:
        step = first.train_step if trains else first.evaluate
        step(make_batch((2, 2)))
    read.clear()
    fetched, moved = session.fetch_changed(weights, with_optimizer=True)
    assert bool(read) != trains
    assert (moved.spared_bytes == 0) == trains
    whole = session.fetch_weights(with_optimizer=True)
    assert set(whole) == set(fetched) and any("/" in key for key in whole) == trains
    assert all(torch.equal(fetched[key], whole[key]) for key in whole)
    changed = {key for key in weights if not torch.equal(weights[key], whole[key])}
    assert changed == (set(weights) if trains else set())


def test_a_host_forgets_what_the_session_before_the_last_held(client: HostClient) -> None:
    old, new = _weights(), {key: tensor + 1 for key, tensor in _weights().items()}
    for session_id, weights in (("a", old), ("b", new)):
        _push(client, session_id, weights)
        client.get_session(session_key(session_id)).close()
    assert _push(client, "c", old).sent_bytes == _bytes(old)


def test_a_host_without_a_store_asks_for_everything() -> None:
    weights = _weights()
    with (
        HostServer("127.0.0.1:0", HostService(build_head)) as server,
        HostClient(server.address) as client,
    ):
        for session_id in ("a", "b"):
            assert _push(client, session_id, weights).sent_bytes == _bytes(weights)
            client.get_session(session_key(session_id)).close()


def test_a_digest_tells_values_dtypes_and_shapes_apart() -> None:
    one = torch.arange(6, dtype=torch.float32)
    others = (one + 1, one.to(torch.int32), one.view(2, 3), one.view(3, 2), one[:5], one.double())
    digests = {compute_digest(tensor) for tensor in (one, *others)}
    assert len(digests) == 7
    assert compute_digest(one.clone()) == compute_digest(one)
    column = torch.stack([one, one], dim=1)[:, 0]
    assert not column.is_contiguous() and compute_digest(column) == compute_digest(one)
    assert compute_digest(torch.tensor(-0.0)) != compute_digest(torch.tensor(0.0))
