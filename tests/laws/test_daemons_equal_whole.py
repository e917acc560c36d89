"""The first law over real processes and mutual TLS: four daemons compute what one model does."""

from __future__ import annotations

import itertools
import signal
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.order import TrainingOrder
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import (
    ClusterConfig,
    MemberConfig,
    parse_cluster,
    read_cluster,
)
from collapipe_flwr.core.errors import EdgeLost, Unreachable
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import ActivationNoise, ExamplePrivacy
from collapipe_flwr.pipeline.optimizer import OptimizerConfig, ParameterGroup
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.client import HostClient
from tests.closeness import assert_near, near
from tests.cluster.daemon_processes import Daemon, running
from tests.host.chain_to_edge import request as session_request
from tests.rounds import (
    ADAMW,
    SGD,
    Cut,
    bert,
    largest_difference,
    make_splitter,
    micro_batches,
    order_of,
    recovery,
    steps_of,
    train_split,
    train_whole,
    without_labels,
)

DEVICES = ("d0", "d1", "d2")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Addresses of running daemons, and the certificate of the control unit."""

    config: ClusterConfig
    daemons: tuple[Daemon, ...] = ()  # as in DEVICES, then the edge
    deadline_s: float = 20.0

    def client(self, member: MemberConfig) -> HostClient:
        """As the control unit."""
        name = member.name if self.config.tls else ""
        return HostClient(member.address, tls=self.config.tls_files("cu"), certificate_name=name)

    def train(
        self, splitter: Splitter, order: TrainingOrder, steps, between=lambda: None, every: int = 0
    ) -> ClusterResult:
        """One round. ``between`` runs before every step.

        After ``every`` so many steps all parts come back and are placed again.
        """
        edge = HostedEdge(
            address=self.config.edge.address,
            certificate_name=self.config.certificate_name(self.config.edge),
            tls=self.config.tls_files("cu"),
            deadline_s=self.deadline_s,
        )
        fleet = RemoteFleet(cluster=self.config, edges={"": edge}, deadline_s=self.deadline_s)
        batches = (b for b in micro_batches(splitter, steps) if between() is None)
        order = replace(order, learning=replace(order.learning, snapshot_every=every))
        kept = recovery(splitter) if every else None
        return train_round(splitter, order, batches, fleet, recovery=kept)

    def sessions(self) -> int:
        """How many are open on all hosts."""
        total = 0
        for member in (*self.config.devices, self.config.edge):
            with self.client(member) as client:
                total += client.ask_health().sessions
        return total


@pytest.fixture(scope="module", params=["tls", pytest.param("plain", marks=pytest.mark.slow)])
def cluster(request, tmp_path_factory) -> Iterator[Cluster]:
    with cluster_of_daemons(
        tmp_path_factory.mktemp(request.param), request.param == "tls"
    ) as found:
        yield found


CLUSTER_FILE = """
id = "A"
control-unit = { name = "cu" }
device = [
  { name = "d0", address = "d0:1" },
  { name = "d1", address = "d1:1" },
  { name = "d2", address = "d2:1" },
]
edge = { address = "edge:1" }
"""


@contextmanager
def cluster_of_daemons(
    folder: Path,
    tls: bool,
    *,
    edge_also_serves: Sequence[Path] = (),
    boards: Mapping[str, type[Daemon]] | None = None,
) -> Iterator[Cluster]:
    """Four daemons that know each other by their cluster file; some may be ``boards`` by name."""
    file = folder / "a.toml"
    file.write_text(CLUSTER_FILE + ("[tls]\n" if tls else ""))
    values = tomllib.loads(file.read_text())
    config = read_cluster(file)
    if config.tls:
        sign_all(folder / "certs", dict.fromkeys(config.names, ()))
    more = [word for path in edge_also_serves for word in ("--cluster", str(path))]
    kinds = {**dict.fromkeys(DEVICES, Daemon), **(boards or {})}
    daemons = [
        kind("device", "--name", name, "--cluster", str(file), tls=config.tls_files(name))
        for name, kind in kinds.items()
    ]
    daemons.append(Daemon("edge", "--cluster", str(file), *more, tls=config.tls_files("edge")))
    with running(*daemons) as (*devices, edge):
        for table, daemon in zip(values["device"], devices, strict=True):
            table["address"] = daemon.address
        values["edge"] = {"address": edge.address}
        yield Cluster(config=parse_cluster(values, folder), daemons=(*devices, edge))


@pytest.mark.parametrize("model_type", ["marian", "bert"])
@pytest.mark.parametrize("rule", [SGD, ADAMW], ids=lambda r: r.name)
def test_a_round_on_daemons_equals_the_unsplit_model(cluster: Cluster, model_type, rule) -> None:
    splitter = make_splitter(model_type, dropout=0.0)
    weights = splitter.initial_weights(seed=1)
    cut = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1), schedule="1f1b")
    first, second = steps_of(splitter, cut, count=2)
    steps = [first, [without_labels(batch) for batch in first], second]
    result = cluster.train(splitter, order_of(cut, weights, rule), steps)
    losses, whole = train_whole(splitter, weights, steps, rule)
    assert result.losses == near(losses)
    assert_near(dict(result.weights), whole)
    assert largest_difference(whole, weights) > 1e-3
    names = ["control-unit", "A/d0", "A/d1", "A/d2", "edge"]
    assert [report.name for report in result.reports] == names
    assert all(report.steps == 2 for report in result.reports)
    assert cluster.sessions() == 0


@pytest.mark.parametrize("every", [0, 2])
def test_whatever_the_optimizer_keeps_travels_between_daemons(cluster: Cluster, every: int) -> None:
    rule = OptimizerConfig(
        name="NAdam",
        learning_rate=0.02,
        arguments={"eps": 1e-2},
        groups=(ParameterGroup(patterns=("*.bias",), learning_rate=0.01),),
        schedule="linear",
        warmup_steps=1,
        proximal_mu=0.3,
    )
    splitter = bert()
    weights = splitter.initial_weights(seed=2)
    cut = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1), schedule="1f1b")
    steps = steps_of(splitter, cut, count=4)
    order = order_of(cut, weights, rule, batches=len(steps))
    result = cluster.train(splitter, order, steps, every=every)
    losses, whole = train_whole(splitter, weights, steps, rule)
    assert result.losses == near(losses)
    assert_near(dict(result.weights), whole, depth=len(steps))
    assert largest_difference(whole, weights) > 1e-3


def test_dropout_on_daemons_is_that_of_threads(cluster: Cluster) -> None:
    splitter = make_splitter("bert", dropout=0.2)
    weights = splitter.initial_weights(seed=5)
    cut = Cut(stops=(2, 5), micro_batches=(3, 3))
    steps = steps_of(splitter, cut, count=2)
    order = order_of(cut, weights, ADAMW, dropout_seed=1)
    result = cluster.train(splitter, order, steps)
    losses, threads = train_split(splitter, weights, cut, steps, ADAMW, dropout_seed=1)
    assert result.losses == near(losses)
    assert_near(dict(result.weights), threads)


NOISES = {
    "gradients": {"privacy": ExamplePrivacy(group_norm=0.05, deviation=0.1, secret="ab")},
    "activations": {"activations": ActivationNoise(behind=3, norm=9.4, deviation=0.1, secret="ab")},
}


@pytest.mark.parametrize("noised", NOISES)
def test_noise_on_daemons_is_that_of_threads_bit_for_bit(cluster: Cluster, noised: str) -> None:
    splitter = bert()
    weights = splitter.initial_weights(seed=5)
    cut = Cut(stops=(1, 2, 5), micro_batches=(1, 1, 1), schedule="1f1b")
    steps = steps_of(splitter, cut, count=3)
    result = cluster.train(splitter, order_of(cut, weights, ADAMW, **NOISES[noised]), steps)
    losses, threads = train_split(splitter, weights, cut, steps, ADAMW, **NOISES[noised])
    assert result.losses == losses
    assert all(torch.equal(result.weights[key], tensor) for key, tensor in threads.items())
    _, quiet = train_split(splitter, weights, cut, steps, ADAMW)
    assert largest_difference(quiet, threads) > 1e-3


def test_a_round_that_fails_leaves_no_session(cluster: Cluster) -> None:
    splitter = bert()
    cut = Cut(stops=(2, 5), micro_batches=(2,))
    order = order_of(cut, splitter.initial_weights(seed=1), SGD)
    nobody = HostedEdge(address="127.0.0.1:1", patience_s=0.1)
    fleet = RemoteFleet(cluster=cluster.config, edges={"": nobody})
    batches = micro_batches(splitter, steps_of(splitter, cut, count=1))
    with pytest.raises(EdgeLost, match=r"edge at 127.0.0.1:1 cannot be reached"):
        train_round(splitter, order, batches, fleet)
    assert cluster.sessions() == 0


def test_a_second_round_moves_only_what_changed_hands(cluster: Cluster) -> None:
    """And the edge's part, which an edge of several clusters does not keep."""
    splitter = bert()
    weights = splitter.initial_weights(seed=7)
    cut, other = Cut(stops=(2, 5), micro_batches=(2,)), Cut(stops=(3, 5), micro_batches=(2,))
    steps = steps_of(splitter, cut, count=1)
    first = cluster.train(splitter, order_of(cut, weights, SGD), steps)
    edge_bytes, block_bytes = (
        sum(weights[key].nbytes for key in keys)
        for keys in (splitter.edge_keys(), splitter.segment_keys(2, 3))
    )
    trained = {**weights, **first.weights}
    again = cluster.train(splitter, order_of(cut, trained, SGD), steps)
    assert again.moved.sent_bytes == edge_bytes
    assert again.moved.spared_bytes == 5 * block_bytes
    trained = {**trained, **again.weights}
    recut = cluster.train(splitter, order_of(other, trained, SGD), steps)
    assert recut.moved.sent_bytes == edge_bytes + block_bytes  # the third block goes from d1 to d0
    _, whole = train_whole(splitter, trained, steps, SGD)
    assert_near(dict(recut.weights), whole)


@pytest.mark.timeout(200)
def test_a_stop_in_the_middle_of_a_round_loses_nothing_of_it(cluster: Cluster) -> None:
    """It ends a device in good order, so this is the last test of these daemons."""
    splitter = bert()
    cut = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1))
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, cut, count=4)
    device = cluster.daemons[1].process
    undisturbed = cluster.train(splitter, order_of(cut, weights, SGD), steps)
    begun = itertools.count()

    def stopping() -> None:
        if next(begun) == 1:
            device.send_signal(signal.SIGTERM)

    result = cluster.train(splitter, order_of(cut, weights, SGD), steps, stopping)
    assert result.losses == undisturbed.losses
    assert device.wait(60) == 0
    with cluster.client(cluster.config.devices[1]) as client, pytest.raises(Unreachable):
        client.open_session(session_request())
