"""Law: devices that only dial out train the unsplit model, over TLS through their control unit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import parse_cluster
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.client import Dialer
from collapipe_flwr.transport.dialing import Dialing
from collapipe_flwr.transport.relay import DialRelay
from tests.closeness import assert_near, near
from tests.ports import free_port
from tests.rounds import (
    ADAMW,
    Cut,
    make_splitter,
    micro_batches,
    recovery,
    steps_of,
    train_whole,
)

NAMES = ("d0", "d1", "d2")
CUT = Cut(stops=(1, 2, 5), micro_batches=(2, 2, 1), schedule="1f1b")


@pytest.fixture
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[RemoteFleet, DialRelay]]:
    """Three hosts and an edge; those that dial are at the relay's address, and nowhere else."""
    sign_all(tmp_path / "certs", dict.fromkeys((*NAMES, "cu", "edge", "server"), ()))
    values = {"id": "A", "relay": f"127.0.0.1:{free_port()}", "control-unit": {"name": "cu"}}
    blank = {**values, "device": [{"name": n, "dials": True} for n in NAMES], "tls": {}}
    config = parse_cluster(blank, tmp_path)

    def host(name: str) -> HostServer:
        tls = config.tls_files(name)
        service = HostService(connect=Dialer(name=name, tls=tls))
        return stack.enter_context(HostServer("127.0.0.1:0", service, tls=tls))

    with ExitStack() as stack:
        there = stack.enter_context(DialRelay(config.relay_address, lambda: [config]))
        hosts = {name: host(name).address for name in NAMES}
        for name in request.param:
            admitted, tls = threading.Event(), config.tls_files(name)
            assert tls is not None
            dialing = Dialing(
                relay=config.relay_address,
                unit="cu",
                tls=tls,
                listens=hosts[name],
                on_admitted=admitted.set,
            )
            stack.enter_context(dialing())
            assert admitted.wait(60)
        devices = [
            {"name": n, **({"dials": True} if n in request.param else {"address": hosts[n]})}
            for n in NAMES
        ]
        config = parse_cluster({**blank, "device": devices}, tmp_path)
        edge = HostedEdge(
            address=host("edge").address, certificate_name="edge", tls=config.tls_files("cu")
        )
        yield RemoteFleet(cluster=config, edges={"": edge}), there


CASES = [(("d1",), False), (("d1", "d2"), False), (("d1",), True)]


@pytest.mark.parametrize(
    ("fleet", "leaves"), CASES, ids=["one", "two", "one leaves"], indirect=["fleet"]
)
def test_a_round_with_devices_that_dial_equals_the_unsplit_model(
    fleet: tuple[RemoteFleet, DialRelay], leaves: bool
) -> None:
    """Also if one is dropped amid the round, which is repaired as any loss of a device."""
    remote, relay = fleet
    splitter = make_splitter("bert", dropout=0.0)
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, CUT, count=3)
    order = TrainingOrder(
        plan=CUT.plan(),
        weights=weights,
        learning=LearningSettings(optimizer=ADAMW, deadline_s=20.0),
    )

    def batches():
        for number, batch in enumerate(micro_batches(splitter, steps)):
            if leaves and number == 1:
                (dialled,) = relay._dialled.values()
                dialled.secured.close()
            yield batch

    result = train_round(splitter, order, batches(), remote, recovery=recovery(splitter))
    losses, whole = train_whole(splitter, weights, steps, ADAMW)
    assert result.losses == near(losses)
    assert_near(dict(result.weights), whole)
    assert bool(result.incidents) is leaves
