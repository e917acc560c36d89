"""Roles over mutual TLS: a member reaches what its role needs, another cluster's nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from collapipe_flwr.config.cluster_file import parse_cluster
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.host.ledger import Ledger
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener
from collapipe_flwr.host.servicer import Servicer
from collapipe_flwr.pipeline.benchmark import BenchmarkRequest
from collapipe_flwr.pipeline.config import PassesDone, SessionKey
from collapipe_flwr.transport.certificates import Authority, sign_all
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.methods import ProbeRequest
from tests.host.chain_to_edge import request, service, session_key
from tests.pipeline.chains import Head

CLUSTERS = {"g": ("g1", "g2"), "w": ("w1",)}
CONFIGS = [
    parse_cluster(
        {
            "id": name,
            "control-unit": {"name": f"cu-{name}"},
            "device": [{"name": device, "address": f"{device}:1"} for device in devices],
        },
        Path("."),
    )
    for name, devices in CLUSTERS.items()
]
MEMBERS = sorted({name for config in CONFIGS for name in config.names})
HEAD_BYTES = sum(t.nbytes for t in Head().state_dict().values())


class Host:
    """A device or the edge, and clients of it with anybody's certificate."""

    def __init__(self, address: str, name: str, certificates) -> None:
        self.address, self._name, self._certificates = address, name, certificates

    @contextmanager
    def seen_by(self, member: str) -> Iterator[HostClient]:
        with self.seen_with(self._certificates[member]) as client:
            yield client

    @contextmanager
    def seen_with(self, tls: TlsFiles) -> Iterator[HostClient]:
        with HostClient(
            self.address, tls=tls, certificate_name=self._name, deadline_s=10
        ) as client:
            yield client

    def refuses(self, member: str, call: Callable[[HostClient], object], said: str) -> None:
        with self.seen_by(member) as client, pytest.raises(LinkError, match=said):
            call(client)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return sign_all(tmp_path_factory.mktemp("certs"), dict.fromkeys(MEMBERS, ()))


def host(name: str, certificates, *, on_edge: bool) -> Iterator[Host]:
    tls = certificates[name]
    rosters = Rosters(name, CONFIGS if on_edge else CONFIGS[:1], tls.ca)
    held = service(ledger=Ledger(6 * HEAD_BYTES))
    sharing = lambda: rosters.access.control_units  # noqa: E731
    servicer = Servicer(held, control_units=sharing, sessions_of_each=2)
    with Listener(
        "127.0.0.1:0", lambda: servicer, tls=tls, rosters=rosters, on_edge=on_edge
    ) as listener:
        yield Host(listener.address, name, certificates)


@pytest.fixture
def device(certificates) -> Iterator[Host]:
    yield from host("g2", certificates, on_edge=False)


@pytest.fixture
def edge(certificates) -> Iterator[Host]:
    yield from host("edge", certificates, on_edge=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.open_session(request()),
        lambda c: c.get_session(session_key()).push_weights({}),
        lambda c: c.get_session(session_key()).fetch_weights(),
        lambda c: c.get_session(session_key()).close(),
        lambda c: c.benchmark(BenchmarkRequest(width=32, seconds=0.1)),
        lambda c: c.probe(ProbeRequest(name="x", address="127.0.0.1:1")),
    ],
)
def test_only_its_control_unit_gives_a_device_orders(device: Host, call) -> None:
    with device.seen_by("cu-g") as client:
        client.open_session(request())
    for member in ("g1", "server", "edge"):
        device.refuses(member, call, "it may not call")
    for member in ("cu-w", "w1"):
        device.refuses(member, call, "no member here")


def test_a_neighbour_may_stream_with_the_token_only(device: Host) -> None:
    with device.seen_by("cu-g") as client:
        client.open_session(request())
        client.get_session(session_key()).push_weights(Head().state_dict())
    device.refuses(
        "g1",
        lambda c: c.get_session(SessionKey(session_id="c1", token="a guess of a token")).stream(),
        "no session c1",
    )
    with device.seen_by("g1") as client:
        client.get_session(session_key()).stream().close()


@pytest.fixture
def shared(edge: Host) -> Host:
    """The edge, where the control unit of cluster g opened a session."""
    with edge.seen_by("cu-g") as unit:
        unit.open_session(request("s-g", cluster_id="g", attempt=1))
        unit.get_session(session_key("s-g")).push_weights(Head().state_dict())
    return edge


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.get_session(session_key("s-g")).stream(),
        lambda c: c.get_session(session_key("s-g")).report(),
        lambda c: c.get_session(session_key("s-g")).fetch_weights(),
        lambda c: c.get_session(session_key("s-g")).push_weights({}),
        lambda c: c.get_session(session_key("s-g")).close(),
    ],
)
def test_another_cluster_cannot_touch_a_session_even_with_its_token(shared: Host, call) -> None:
    shared.refuses("cu-w", call, "no session s-g with this token")
    shared.refuses("w1", call, "no session s-g with this token|it may not call")
    with shared.seen_by("cu-g") as unit:
        assert set(unit.get_session(session_key("s-g")).fetch_weights()) == set(Head().state_dict())


def test_a_device_of_the_cluster_streams_into_its_session_and_no_more(shared: Host) -> None:
    with shared.seen_by("g2") as last:
        last.get_session(session_key("s-g")).stream().close()
    for call in (
        lambda c: c.open_session(request()),
        lambda c: c.get_session(session_key("s-g")).fetch_weights(),
        lambda c: c.get_session(session_key("s-g")).push_weights({}),
        lambda c: c.get_session(session_key("s-g")).close(),
        lambda c: c.ask_progress(within_s=10.0),
    ):
        shared.refuses("g2", call, "g2 is a device: it may not call")


def test_the_server_only_asks_the_edge_how_far_rounds_are(shared: Host) -> None:
    with shared.seen_by("server") as server:
        server.echo()
        assert server.ask_progress(within_s=10.0) == {"g": PassesDone(attempt=1)}
    for call in (
        lambda c: c.open_session(request(cluster_id="g")),
        lambda c: c.get_session(session_key("s-g")).stream(),
        lambda c: c.get_session(session_key("s-g")).fetch_weights(),
        lambda c: c.get_session(session_key("s-g")).push_weights({}),
        lambda c: c.get_session(session_key("s-g")).report(),
        lambda c: c.get_session(session_key("s-g")).close(),
    ):
        shared.refuses("server", call, "server is a server: it may not call")


def test_a_control_unit_opens_sessions_for_its_own_cluster(edge: Host) -> None:
    edge.refuses("cu-w", lambda c: c.open_session(request(cluster_id="g")), "no session for the")
    with edge.seen_by("cu-w") as unit:
        unit.open_session(request("mine", opener="cu-g"))  # who opened it is not taken on trust
        unit.get_session(session_key("mine")).push_weights(Head().state_dict())
        assert unit.get_session(session_key("mine")).fetch_weights()
    edge.refuses("cu-g", lambda c: c.get_session(session_key("mine")).stream(), "no session mine")


def test_a_control_unit_displaces_only_itself(shared: Host) -> None:
    with shared.seen_by("cu-w") as unit:
        for number in range(5):
            unit.open_session(request(f"w-{number}", run_id=str(number)))
    with shared.seen_by("cu-g") as unit:
        assert unit.ask_health().sessions == 3
        assert unit.get_session(session_key("s-g")).fetch_weights()


def test_control_units_have_equal_shares_of_the_memory(edge: Host) -> None:
    with edge.seen_by("cu-w") as unit:
        unit.open_session(request("w-1", run_id="1"))
        unit.get_session(session_key("w-1")).push_weights(Head().state_dict())
        unit.open_session(request("w-2", run_id="2"))
        with pytest.raises(LinkError, match="no room"):
            unit.get_session(session_key("w-2")).push_weights(Head().state_dict())
    with edge.seen_by("cu-g") as unit:
        unit.open_session(request("s-g"))
        unit.get_session(session_key("s-g")).push_weights(Head().state_dict())


def test_one_control_unit_has_all_the_memory(device: Host) -> None:
    with device.seen_by("cu-g") as unit:
        for number in ("1", "2"):
            unit.open_session(request(number, run_id=number))
            unit.get_session(session_key(number)).push_weights(Head().state_dict())


def test_the_host_in_a_certificate_is_not_who_its_bearer_is(device, edge, certificates) -> None:
    authority = Authority(certificates["edge"].ca.parent)
    for member in MEMBERS:  # what the removed machine was reached by
        removed = authority.issue("removed", [member])
        for host in (device, edge):
            with (
                host.seen_with(removed) as client,
                pytest.raises(LinkError, match="names removed, which is no member here"),
            ):
                client.echo()


def test_a_role_does_not_come_from_a_host(device: Host, edge: Host, certificates) -> None:
    authority = Authority(certificates["edge"].ca.parent)
    neighbour = authority.issue("g1", ["cu-g", "server", "edge"])
    for host in (device, edge):
        with host.seen_with(neighbour) as client:
            client.echo()
            with pytest.raises(LinkError, match="g1 is a device: it may not call OpenSession"):
                client.open_session(request("mine"))
