"""The edge over real gRPC on loopback: equal numbers, rounds, codecs, TLS, and clear refusals."""

from __future__ import annotations

import json
import socket
import time

import grpc
import pytest
import torch

from collapipe_flwr.core.errors import Busy, ConfigError, LinkError, LinkTimeout, ModelError
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.version import read_own_version
from collapipe_flwr.host.ledger import Ledger
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.pipeline.benchmark import BenchmarkRequest
from collapipe_flwr.pipeline.link import Frame, FrameKind
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.codec import decode_frame, encode_frame
from collapipe_flwr.transport.tls import (
    TlsFiles,
    build_client_credentials,
    build_server_credentials,
)
from tests.closeness import assert_near, near
from tests.host.certificates import Authority
from tests.host.chain_to_edge import TOKEN, Cluster, open_session, request, service, session_key
from tests.pipeline.chains import DEADLINE_S, Head, make_batch, make_parts, whole_loss
from tests.threads import none_left


@pytest.fixture
def server():
    with HostServer("127.0.0.1:0", service()) as running:
        yield running


@pytest.fixture
def client(server):
    with HostClient(server.address, deadline_s=10) as connected:
        yield connected


def reference_step(seed: int = 1):
    parts, batch = make_parts((2,)), make_batch((3, 3, 2), seed)
    loss = whole_loss(parts, batch)
    loss.backward()
    with torch.no_grad():
        for part in parts:
            for p in part.parameters():
                p -= 0.5 * p.grad
    return parts, batch, loss.item()


def one_round(client: HostClient, codec: str = "fp32"):
    """One step on a fresh session; returns loss, all weights by part, and the device's report."""
    parts = make_parts((2,))
    open_session(client, parts[2])
    link = client.get_session(session_key()).stream(name="device 1", config=LinkConfig(codec=codec))
    cluster = Cluster(parts, link)
    with cluster.running() as first:
        result = first.train_step(make_batch((3, 3, 2)))
    assert cluster.failure is None
    parts[2].load_weights(client.get_session(session_key()).fetch_weights())
    return result.loss, parts, cluster.device.report()


def assert_equals_reference(loss, parts):
    wholes, _, expected = reference_step()
    assert loss == near(expected)
    for part, whole in zip(parts, wholes, strict=True):
        assert_near(list(part.parameters()), list(whole.parameters()))


def test_a_host_at_work_says_so_and_is_not_measured(client):
    quick = BenchmarkRequest(width=32, tokens=4, examples=2, seconds=0.05)
    assert not client.ask_status().at_work and client.benchmark(quick).seconds > 0
    open_session(client, make_parts((2,))[2])
    assert client.ask_status().at_work
    with pytest.raises(Busy, match="at work"):
        client.benchmark(quick)
    client.get_session(session_key()).close()
    assert not client.ask_status().at_work and client.benchmark(quick).seconds > 0


def test_a_round_over_grpc_equals_one_process(client):
    loss, parts, device = one_round(client)
    assert_equals_reference(loss, parts)
    edge = client.get_session(session_key()).report()
    assert edge.steps == 1
    # The END frame may still be on its way to be counted; nothing else may differ.
    assert edge.received_up.bytes == device.sent_down.bytes > 0
    assert edge.sent_up.bytes == device.received_down.bytes > 0


@pytest.mark.parametrize(("codec", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2)])
def test_codecs_shrink_the_stream_and_stay_close(client, codec, tolerance):
    loss, _, device = one_round(client, codec)
    _, _, expected = reference_step()
    assert loss == pytest.approx(expected, rel=tolerance)
    client.get_session(session_key()).close()
    _, _, exact = one_round(client)
    assert device.sent_down.bytes < exact.sent_down.bytes
    assert device.received_down.bytes < exact.received_down.bytes


def test_mutual_tls(tmp_path):
    authority = Authority(tmp_path)
    edge, device = authority.issue("edge"), authority.issue("device")
    with HostServer("127.0.0.1:0", service(), tls=edge) as server:
        with HostClient(server.address, tls=device) as client:
            loss, parts, _ = one_round(client)
        assert_equals_reference(loss, parts)
        (tmp_path / "other").mkdir()
        stranger = Authority(tmp_path / "other").issue("stranger")
        own_ca_only = TlsFiles(ca=authority.ca)
        forged = TlsFiles(ca=authority.ca, certificate=stranger.certificate, key=stranger.key)
        for files in (None, stranger, own_ca_only, forged):
            with (
                HostClient(server.address, tls=files, deadline_s=5) as outsider,
                pytest.raises(LinkError, match="edge at 127"),
            ):
                outsider.ask_health()


def test_a_paced_stream_takes_as_long_as_its_link(client):
    parts = make_parts((2,))
    open_session(client, parts[2])
    pace = LinkConfig(forward_bit_per_s=160_000.0, backward_bit_per_s=160_000.0)
    cluster = Cluster(parts, client.get_session(session_key()).stream(config=pace))
    with cluster.running() as first:
        start = time.monotonic()
        first.train_step(make_batch((3, 3, 2)))
        seconds = time.monotonic() - start
    sent = cluster.device.report().sent_down.bytes
    assert sent / 20_000 * 0.8 < seconds


@pytest.mark.parametrize("version", ["0.9.9", ""])
def test_who_runs_another_version_opens_no_session_whatever_it_asks(client, version):
    told = ((methods.VERSION_KEY, version),) if version else ()
    with pytest.raises(LinkError, match=f"{version}.* and this host version {read_own_version()}"):
        client.call(methods.OPEN_SESSION, {"a key of": "another version"}, metadata=told)
    client.open_session(request())


def test_the_timeline_of_the_edge_reaches_the_client(client):
    parts = make_parts((2,))
    client.open_session(request(keep_spans=True))
    client.get_session(session_key()).push_weights(parts[2].state_dict())
    with Cluster(parts, client.get_session(session_key()).stream()).running() as first:
        first.train_step(make_batch((3, 3, 2)))
    works = [span.work for span in client.get_session(session_key()).report().spans]
    assert works.count("forward") == works.count("backward") == 3


def test_missing_tls_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.pem \(No such file .*`collapipe certs` makes"):
        build_client_credentials(TlsFiles(ca=tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigError, match="certificate and a key"):
        build_server_credentials(TlsFiles())
    with pytest.raises(ConfigError, match="CA"):
        build_client_credentials(TlsFiles())


def test_several_rounds_and_sessions_on_one_server(client):
    heads = [Head(), Head()]
    for index, head in enumerate(heads):
        open_session(client, head, f"c{index}")
    for _ in range(2):
        for index in range(2):
            link = client.get_session(session_key(f"c{index}")).stream()
            with Cluster(make_parts((1,)), link).running() as first:
                first.train_step(make_batch((2, 2)))
        client.get_session(session_key("c0")).push_weights(heads[0].state_dict())
    assert client.ask_health().sessions == 2
    assert torch.equal(
        client.get_session(session_key("c0")).fetch_weights()["out.bias"], heads[0].out.bias
    )
    assert not torch.equal(
        client.get_session(session_key()).fetch_weights()["out.bias"], heads[1].out.bias
    )


def test_refusals_are_one_sentence_with_the_address(server, client):
    for call, said in (
        (lambda: client.get_session(session_key()).stream(), "no session c1"),
        (lambda: client.get_session(session_key()).fetch_weights(), "no session c1"),
        (lambda: client.get_session(session_key()).push_weights({}), "no session c1"),
        (lambda: client.open_session(request(token="short")), "16 characters"),
        (lambda: client.open_session(request(schedule="1f1b", depth=0)), "depth must be >= 1"),
    ):
        with pytest.raises(LinkError, match=f"edge at {server.address} refused: .*{said}"):
            call()
    assert client.ask_health().running == 0


def test_names_of_any_alphabet(client):
    open_session(client, Head())
    link = client.get_session(session_key()).stream(name="café 1")
    link.close()
    with pytest.raises(ConfigError, match="ASCII"):
        request("é")


def test_a_second_stream_is_refused_while_one_runs(client):
    open_session(client, Head())
    link = client.get_session(session_key()).stream()
    with pytest.raises(LinkError, match="middle of a stream"):
        client.get_session(session_key()).stream()
    link.close()


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    start = time.monotonic()
    with HostClient(address, deadline_s=DEADLINE_S) as client:
        with pytest.raises(LinkError, match=f"edge at {address} cannot be reached"):
            client.ask_health()
        with pytest.raises(LinkError, match=f"edge at {address} cannot be reached"):
            client.get_session(session_key()).stream()
    assert time.monotonic() - start < DEADLINE_S / 2


def test_somebody_there_who_never_answers():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        start = time.monotonic()
        with HostClient(address, deadline_s=0.5) as client:
            with pytest.raises(LinkTimeout, match=f"edge at {address}"):
                client.ask_health()
            with pytest.raises(LinkTimeout, match=f"edge at {address}"):
                client.get_session(session_key()).stream()
        assert time.monotonic() - start < DEADLINE_S / 2


@pytest.mark.parametrize(
    ("listen", "why"),
    [
        ("", "Address already in use"),
        ("192.0.2.1:0", "Cannot assign requested address"),
    ],
    ids=["taken", "not ours"],
)
def test_where_a_server_cannot_listen_and_why_is_all_that_is_said(server, listen, why, capfd):
    place = listen or server.address
    with pytest.raises(ConfigError, match="cannot listen on") as refusal:
        HostServer(place, service())
    assert place in str(refusal.value) and why in str(refusal.value)
    assert str(refusal.value).endswith("choose a free port and an address of this machine")
    assert capfd.readouterr().err == ""


def test_nothing_is_left_running():
    with (
        none_left(),
        HostServer("127.0.0.1:0", service()) as server,
        HostClient(server.address) as client,
    ):
        one_round(client)


KEY = ((methods.SESSION_KEY, "c1"), (methods.TOKEN_KEY, TOKEN))
GARBAGE = [
    b"",
    b"\0" * 100,
    b"CPF2" + b"\xff" * 60,
    b"{}",
    encode_frame(Frame(kind=FrameKind.HELLO)),
]


def raw_call(address: str, name: str, messages: list[bytes], metadata=KEY) -> list[bytes]:
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{methods.SERVICE}/{name}", None, None)
        return list(call(iter(messages), timeout=10, metadata=metadata))


@pytest.mark.parametrize("name", ["OpenSession", "PushWeights"])
@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_in_a_call_is_an_error_for_that_peer_only(server, client, name, data):
    open_session(client, Head())
    with pytest.raises(grpc.RpcError) as caught:
        raw_call(server.address, name, [data], (*KEY, (methods.VERSION_KEY, read_own_version())))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    client.get_session(session_key()).fetch_weights()


STREAM = (methods.STREAM_KEY, to_json(methods.StreamRequest(name="peer", link=LinkConfig())))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"stream_id": -1}, "the id of a stream must be >= 0"),
        ({"stream_id": 2**63}, "the id of a stream must be >= 0"),
        ({"stream_id": 10**29}, "stream_id must be a whole number of at most 64 bits"),
        ({"stream_id": "one"}, "stream_id must be a whole number"),
        ({"link": {"codec": "fp8"}}, "codec must be one of"),
        ({"link": {"backward_bit_per_s": -1.0}}, "the rate of a link must be > 0"),
        ({"link": {"lane": 2, "lanes": 2}}, "no lane 2 of 2"),
    ],
)
def test_a_malformed_stream_is_refused(server, client, changes, refusal):
    open_session(client, Head())
    request = json.dumps({**json.loads(STREAM[1]), **changes})
    with pytest.raises(grpc.RpcError, match=refusal):
        raw_call(server.address, "Stream", [], (*KEY, (methods.STREAM_KEY, request)))
    client.get_session(session_key()).fetch_weights()


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage_in_a_stream_ends_it_with_an_error_frame(server, client, data):
    open_session(client, Head(), "other")
    open_session(client, Head())
    *_, last = raw_call(server.address, "Stream", [data], (*KEY, STREAM))
    assert decode_frame(last).kind is FrameKind.ERROR
    assert client.ask_health().sessions == 1
    client.get_session(session_key("other")).fetch_weights()


@pytest.mark.parametrize(
    "name", ["PushWeights", "FetchWeights", "Report", "CloseSession", "Stream"]
)
@pytest.mark.parametrize("key", [(), KEY[:1], KEY[1:], (KEY[0], (methods.TOKEN_KEY, "guess"))])
def test_every_call_needs_session_and_token(server, client, name, key):
    open_session(client, Head())
    with pytest.raises(grpc.RpcError):
        raw_call(server.address, name, [b""], (*key, STREAM))
    assert client.ask_health().sessions == 1


def test_an_oversized_message_is_refused(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(methods, "LIMITS", methods.FrameLimits(frame_bytes=10_000))
        small = HostServer("127.0.0.1:0", service())
    with small as server:
        with HostClient(server.address) as client:
            open_session(client, Head())
        with pytest.raises(grpc.RpcError) as caught:
            raw_call(server.address, "Stream", [b"\0" * 20_000], (*KEY, STREAM))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_weights_that_cannot_travel_are_no_fault_of_the_host(client):
    weights = {"rotations": torch.ones(2, dtype=torch.complex64)}
    with pytest.raises(ModelError, match=r"weights cannot be sent: tensors of torch\.complex64"):
        client.open_session(request("c1")).push_weights(weights)


def test_weights_beyond_the_limit_are_refused():
    with (
        HostServer("127.0.0.1:0", service(ledger=Ledger(100))) as server,
        HostClient(server.address) as client,
        pytest.raises(LinkError, match="more than 100 bytes"),
    ):
        open_session(client, Head())


def test_a_stream_whose_peer_leaves_before_it_begins_gives_its_session_back(client, monkeypatch):
    open_session(client, Head())

    def gone(*_: object, **__: object) -> None:
        raise LinkError("broke off the stream")

    with monkeypatch.context() as patched:
        patched.setattr("collapipe_flwr.host.servicer.StreamLink.send", gone)
        with pytest.raises(LinkError, match="broke off the stream"):
            client.get_session(session_key()).stream()
    client.get_session(session_key()).stream().close()
