"""Law: a board without the checkpoint trains adapters as one that has it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import parse_cluster
from collapipe_flwr.core.errors import CheckpointMissing
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService, build_transformers_part
from collapipe_flwr.host.stores import WeightCache
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.spec import LoraConfig
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import NextHop, Placement, SessionRequest
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.state import PartState, compute_digest
from collapipe_flwr.transport.client import Dialer
from tests.closeness import assert_near
from tests.full_disk import full_disk
from tests.host.chain_to_edge import session_key
from tests.power_cuts import rebuilt, watched
from tests.rounds import (
    ADAMW,
    Cut,
    make_splitter,
    micro_batches,
    tiny_batch,
    train_split,
)

CUT = Cut(stops=(2, 5), micro_batches=(2, 2))


def _elsewhere(request: SessionRequest, weights: Mapping[str, Tensor]) -> nn.Module:
    """The builder of a board on which the checkpoint's folder does not exist."""
    values = {**json.loads(request.spec_json), "pretrained": "/no/such/folder"}
    return build_transformers_part(replace(request, spec_json=json.dumps(values)), weights)


@pytest.fixture
def splitter(tmp_path: Path) -> Splitter:
    plain = make_splitter("bert", dropout=0.0)
    save_whole(plain.spec, plain.initial_weights(seed=1), tmp_path)
    lora = LoraConfig(rank=2)
    return Splitter(make_spec("sequence-classification", pretrained=str(tmp_path), lora=lora))


def test_frozen_weights_come_from_the_control_unit_where_they_must_and_once(
    splitter: Splitter, tmp_path: Path
) -> None:
    weights = splitter.initial_weights(seed=1)
    sizes = enumerate(CUT.micro_batches)
    steps = [[tiny_batch(splitter, size, seed=size + i) for i, size in sizes]]
    _, expected = train_split(splitter, weights, CUT, steps, ADAMW)
    cache = tmp_path / "cache"
    rounds = [_train(splitter, weights, steps, cache) for _ in range(2)]
    for result in rounds:  # each on boards that have just started
        assert_near(result.weights, {key: expected[key] for key in result.weights})
    assert any(not torch.equal(v, weights[k]) for k, v in rounds[0].weights.items())
    frozen = splitter.read_resident(splitter.resident_keys_of_segment(2, 5))
    frozen_bytes = sum(t.nbytes for t in frozen.values())
    sent = [result.moved.sent_bytes for result in rounds]
    assert sent[0] - sent[1] == frozen_bytes > 4 * sent[1]
    held = {path.stem for path in cache.iterdir()}
    assert held == {compute_digest(tensor) for tensor in frozen.values()}
    _check_damage(splitter, weights, steps, cache)


def _check_damage(splitter: Splitter, weights: Mapping[str, Tensor], steps, cache: Path) -> None:
    """Files that do not hold what their names say are sent again."""
    first, second, *_ = sorted(cache.iterdir(), key=lambda path: -path.stat().st_size)
    whole = first.read_bytes()
    second.write_bytes(whole)
    first.write_bytes(whole[:100])
    damaged = _train(splitter, weights, steps, cache)
    assert all(compute_digest(load_file(f)["tensor"]) == f.stem for f in (first, second))
    mended = _train(splitter, weights, steps, cache)
    lost = sum(load_file(file)["tensor"].nbytes for file in (first, second))
    assert damaged.moved.sent_bytes - mended.moved.sent_bytes == lost


def _train(splitter: Splitter, weights: Mapping[str, Tensor], steps, cache: Path) -> ClusterResult:
    """A round on a board with the checkpoint and one without."""
    order = TrainingOrder(
        plan=CUT.plan(),
        weights=weights,
        learning=LearningSettings(optimizer=ADAMW, deadline_s=20.0),
    )
    kept = WeightCache(cache, most_bytes=10**9)
    without = HostService(_elsewhere, connect=Dialer(name="d1"), cache=kept)
    with (
        HostServer("127.0.0.1:0", HostService()) as edge,
        HostServer("127.0.0.1:0", HostService(connect=Dialer(name="d0"))) as rich,
        HostServer("127.0.0.1:0", without) as poor,
    ):
        addresses = {"d0": rich.address, "d1": poor.address}
        boards = [{"name": name, "address": address} for name, address in addresses.items()]
        fleet = RemoteFleet(
            cluster=parse_cluster({"id": "A", "device": boards}, Path()),
            edges={"": HostedEdge(address=edge.address)},
        )
        return train_round(splitter, order, micro_batches(splitter, steps), fleet)


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    tensors = {name: torch.full((1000,), float(i)) for i, name in enumerate("abc")}
    digests = {name: compute_digest(tensor) for name, tensor in tensors.items()}
    cache = WeightCache(tmp_path / "x", most_bytes=9000)
    for age, name in enumerate("ab"):
        cache.keep({name: tensors[name]})
        os.utime(tmp_path / "x" / f"{digests[name]}.safetensors", (age, age))
    assert set(cache.find({"a": digests["a"]})) == {"a"}  # used now, so b is the older one
    cache.keep({"c": tensors["c"]})
    assert set(cache.find(digests)) == {"a", "c"}
    (tmp_path / "x" / "abc.safetensors").write_bytes(b"")
    for asked in ("../../etc/passwd", "abc", digests["a"].upper(), f"{digests['a']}0"):
        assert cache.find({"a": asked}) == {}
    assert (tmp_path / "x" / "abc.safetensors").exists()  # it was not even looked for


def test_a_users_own_files_make_no_room(tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    model.write_bytes(bytes(9000))
    os.utime(model, (0, 0))
    tensor = torch.zeros(1000)
    cache = WeightCache(tmp_path, most_bytes=5000)
    cache.keep({"a": tensor})
    assert model.exists() and set(cache.find({"a": compute_digest(tensor)})) == {"a"}


def test_optimizer_slots_are_not_kept_beside_frozen_weights(
    splitter: Splitter, tmp_path: Path
) -> None:
    weights = splitter.initial_weights(seed=1)
    part = splitter.build_segment(2, 5, weights)
    empty = Optimizer(ADAMW, part.named_parameters()).make_meta_state()
    slots = {k: tuple(torch.zeros_like(t, device="cpu") for t in empty[k]) for k in empty}
    trained = PartState(weights=weights, optimizer=slots).select(splitter.segment_keys(2, 5))
    frozen = splitter.read_resident(splitter.resident_keys_of_segment(2, 5))
    cache, key = tmp_path / "cache", session_key("A")
    board = HostService(_elsewhere, cache=WeightCache(cache, most_bytes=10**9))
    hops = (NextHop(address="", key=key),)
    board.open(
        SessionRequest(
            key=key,
            spec_json=splitter.spec.to_json(),
            placement=Placement(blocks=(2, 5), next_hops=hops),
            optimizer=ADAMW,
        )
    )
    with pytest.raises(CheckpointMissing):
        board.push_weights(key, trained.flatten())
    board.push_weights(key, {**trained.flatten(), **frozen})
    assert slots and board.copy_weights(key, with_optimizer=True).keys() == trained.flatten().keys()
    assert {path.stem for path in cache.iterdir()} == {compute_digest(t) for t in frozen.values()}


def test_a_full_disk_is_a_warning_and_leaves_nothing_half_written(tmp_path: Path, caplog) -> None:
    cache = WeightCache(tmp_path, most_bytes=10**9)
    with full_disk():
        cache.keep({"a": torch.zeros(10_000)})
    assert f"frozen weights cannot be kept in {tmp_path}: " in caplog.text
    assert "File too large" in caplog.text
    assert not list(tmp_path.iterdir())


def test_after_every_cut_the_cache_holds_the_tensor_or_none(tmp_path: Path) -> None:
    root, tensor = tmp_path / "disk", torch.arange(10.0)
    root.mkdir()
    with watched(root) as disk:
        WeightCache(root / "cache", most_bytes=10**9).keep({"a": tensor})
    for number, (_, tree) in enumerate(disk.found):
        folder = rebuilt(tree, tmp_path / str(number)) / "cache"
        found = WeightCache(folder, most_bytes=10**9).find({"a": compute_digest(tensor)})
        assert not found or torch.equal(found["a"], tensor)
        assert len(list(folder.iterdir())) == len(found)


def test_two_daemons_may_share_a_cache_and_the_next_removes_what_a_killed_one_left(
    tmp_path: Path,
) -> None:
    tensors = {str(i): torch.full((1000,), float(i)) for i in range(20)}
    caches = [WeightCache(tmp_path, most_bytes=10**9) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda cache: cache.keep(tensors), caches))
    digests = {key: compute_digest(tensor) for key, tensor in tensors.items()}
    assert all(cache.find(digests).keys() == tensors.keys() for cache in caches)
    (tmp_path / "tensors.abcdefgh.collapipe.partial").mkdir()
    WeightCache(tmp_path, most_bytes=10**9)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}
