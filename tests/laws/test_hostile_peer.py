"""Beside a hostile peer a cluster trains as if it were alone: the same bits, and no host grows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from collapipe_flwr.transport.certificates import sign_all
from tests.forked import Process, start
from tests.host.test_daemon import resident_bytes
from tests.laws.test_daemons_equal_whole import cluster_of_daemons
from tests.rounds import SGD, Cut, make_splitter, order_of, steps_of

TIMES = 2  # of every attack
GROWTH_MOST_BYTES = 48 * 2**20
OTHER = """
id = "W"
control-unit = { name = "cu-w" }
device = [{ name = "w1", address = "w1:1" }]
edge = { address = "edge:1" }
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_training_beside_a_hostile_peer_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    other = tmp_path / "w.toml"
    other.write_text(OTHER)
    sign_all(tmp_path / "outside", {"cu": ()})
    with (
        cluster_of_daemons(tmp_path, tls=True, edge_also_serves=[other]) as cluster,
        ExitStack() as stack,
    ):
        guest = tmp_path / "certs"
        sign_all(guest, {"cu-w": (), "w1": ()})
        splitter = make_splitter("bert", dropout=0.1)
        cut = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1), schedule="1f1b")
        steps = steps_of(splitter, cut, count=2)
        order = order_of(cut, splitter.initial_weights(seed=1), SGD, dropout_seed=3)

        def trained() -> dict[str, torch.Tensor]:
            return dict(cluster.train(splitter, order, steps).weights)

        alone = [trained() for _ in range(3)][-1]
        targets = {"d0": cluster.daemons[0], "edge": cluster.daemons[-1]}
        before = {name: resident_bytes(d.process.pid) for name, d in targets.items()}
        peers = [
            stack.enter_context(_hostile(f"{daemon.address}#{name}", guest, tmp_path / "outside"))
            for name, daemon in targets.items()
        ]
        rounds = 0
        while rounds < 2 or any(peer.poll() is None for peer in peers):
            beside = trained()
            rounds += 1
            assert all(torch.equal(alone[key], beside[key]) for key in alone)
        told = {name: _told(peer) for name, peer in zip(targets, peers, strict=True)}
        for name, daemon in targets.items():
            assert set(told[name]["made"].values()) == {TIMES}, told[name]
            assert not told[name]["let_through"], told[name]
            grown = resident_bytes(daemon.process.pid) - before[name]
            assert grown < GROWTH_MOST_BYTES, f"{name} grew by {grown} bytes"
        assert told["edge"]["sessions"]["given"] > 20  # it is a guest there, and was heard
        assert not told["d0"]["sessions"]
        assert all(torch.equal(alone[key], value) for key, value in trained().items())


@contextmanager
def _hostile(target: str, guest: Path, outside: Path) -> Iterator[Process]:
    """The attacks on one host as a process, which does not outlive the test."""
    words = (target, str(TIMES), str(guest), str(outside))
    peer = start("tests.laws.hostile_peer", *words, env=os.environ)
    try:
        yield peer
    finally:
        peer.kill()
        peer.wait(60)
        assert peer.stdout is not None
        peer.stdout.close()


def _told(peer: Process) -> dict[str, dict[str, int]]:
    assert peer.stdout is not None
    said = peer.stdout.read()
    assert peer.wait(120) == 0
    found: dict[str, dict[str, int]] = json.loads(said)
    return found
