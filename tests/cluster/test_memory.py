"""A device holds what its plan was priced at, and no more, round after round of changing plans.

Priced are weights, gradients and optimiser state of the blocks, and activations in flight
(`costs.work`); the ledger of a host has the same without the activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig, parse_cluster
from collapipe_flwr.host.ledger import Ledger
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.host.stores import TensorStore
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.state import OptimizerState, PartState
from collapipe_flwr.transport.client import Dialer, HostClient
from tests.cluster.daemon_processes import Daemon, running
from tests.rounds import ADAMW, Cut, micro_batches, tiny_batch

BLOCKS, TOKENS, SIZE = 6, 8, 2
STOPS = (2, 5, 1, 4)  # of the first device's blocks, round by round
MEGA = 2**20
MARGIN_BYTES = 40 * MEGA  # temporaries of operators, frames, and what the heap does not give back


def make_splitter(width: int) -> Splitter:
    sizes = {"hidden_size": width, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
    more = {"intermediate_size": 4 * width, "max_position_embeddings": 32}
    spec = make_spec(
        "sequence-classification",
        model_type="bert",
        overrides={**sizes, **more},
        vocab_size=50,
        pad_token_id=0,
        num_labels=4,
    )
    return Splitter(spec)


@dataclass(frozen=True)
class Price:
    """What a segment from block 0 on was priced at."""

    state_bytes: int
    bytes: int


def prices(splitter: Splitter) -> dict[int, Price]:
    blocks = profile_model(splitter, BatchShape(source_length=TOKENS, target_length=1)).blocks
    found = {}
    for stop in range(1, BLOCKS):
        state = sum(block.state_bytes for block in blocks[:stop])
        stash = SIZE * sum(block.stash_bytes for block in blocks[:stop])
        found[stop] = Price(state, state + stash)
    return found


class Cluster:
    """Trains rounds on the device at `address` and on one in this process."""

    def __init__(self, splitter: Splitter, address: str, other: str, edge: str) -> None:
        boards = [{"name": n, "address": a} for n, a in (("d0", address), ("d1", other))]
        self._config: ClusterConfig = parse_cluster({"id": "A", "device": boards}, Path())
        self._splitter, self._edge = splitter, edge
        self._weights: dict[str, Tensor] = splitter.initial_weights(seed=1)
        self._slots: OptimizerState = {}

    def round(self, stop: int) -> ClusterResult:
        order = TrainingOrder(
            plan=Cut(stops=(stop, BLOCKS), micro_batches=(SIZE,)).plan(),
            weights=self._weights,
            learning=LearningSettings(optimizer=ADAMW, deadline_s=60.0),
            slots=self._slots,
            keep_optimizer=True,
        )
        steps = [[tiny_batch(self._splitter, SIZE, seed=stop)]] * 2
        fleet = RemoteFleet(cluster=self._config, edges={"": HostedEdge(address=self._edge)})
        batches = micro_batches(self._splitter, steps)
        result = train_round(self._splitter, order, batches, fleet)
        self._weights = {**self._weights, **result.weights}
        self._slots = result.slots
        return result

    def kept_bytes(self, stop: int) -> int:
        """Weights and slots of the first device's blocks."""
        keys = self._splitter.segment_keys(0, stop)
        return PartState(weights=self._weights, optimizer=self._slots).select(keys).num_bytes


@contextmanager
def _others(splitter: Splitter, address: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        edge = stack.enter_context(HostServer("127.0.0.1:0", HostService()))
        second = HostService(connect=Dialer(name="d1"))
        other = stack.enter_context(HostServer("127.0.0.1:0", second))
        yield Cluster(splitter, address, other.address, edge.address)


def test_a_device_reserves_what_its_plan_was_priced_at() -> None:
    splitter = make_splitter(32)
    priced = prices(splitter)
    most = max(priced[stop].state_bytes for stop in STOPS)
    ledger = Ledger(int(1.01 * most))  # a little more: step counts are no part of the price
    device = HostService(connect=Dialer(name="d0"), store=TensorStore(ledger), ledger=ledger)
    with (
        HostServer("127.0.0.1:0", device) as host,
        _others(splitter, host.address) as cluster,
    ):
        for stop in STOPS:
            ledger.peak_bytes = 0
            report = cluster.round(stop).reports[1]
            state_bytes = priced[stop].state_bytes
            assert state_bytes <= ledger.peak_bytes <= 1.01 * most
            assert ledger.held_bytes == cluster.kept_bytes(stop)
            assert state_bytes <= report.peak_tensor_bytes <= 1.01 * priced[stop].bytes


@pytest.mark.slow
def test_a_daemon_never_uses_more_memory_than_its_plans_were_priced_at() -> None:
    """What the kernel counts, above a daemon that has trained once and holds next to nothing.

    When a round begins, the device still has what it kept of the one before.
    """
    small, splitter = make_splitter(32), make_splitter(384)
    priced = {0: 0, **{stop: price.bytes for stop, price in prices(splitter).items()}}
    with (
        running(Daemon("device", "--name", "d0", cold=True)) as (daemon,),
        _others(small, daemon.address) as first,
        _others(splitter, daemon.address) as cluster,
        HostClient(daemon.address) as client,
    ):
        pid = daemon.process.pid
        first.round(1)  # loads the libraries
        idle_bytes = resident(pid, "VmRSS")
        for before, stop in pairwise((0, *STOPS)):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
            cluster.round(stop)
            peak_bytes, now_bytes = (resident(pid, n) - idle_bytes for n in ("VmHWM", "VmRSS"))
            assert peak_bytes <= max(priced[before], priced[stop]) + MARGIN_BYTES
            assert client.ask_health().held_bytes == cluster.kept_bytes(stop)
            assert now_bytes <= cluster.kept_bytes(stop) + MARGIN_BYTES


def resident(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(name)
    )
