"""What connections send that no call asked for is bounded; what calls ask for is not counted."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace

import grpc
import pytest

from collapipe_flwr.host.server import Listener
from collapipe_flwr.transport import intake
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.intake import Intake
from collapipe_flwr.transport.methods import Method
from collapipe_flwr.transport.server import Server

BOUND = 10_000
LOOKS = 2 + intake._SPARED_LOOKS  # after which nothing is spared any more
METHOD = Method("Any", message_bytes=BOUND)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as open_until_the_end:
        yield open_until_the_end


@pytest.fixture(params=[socket.AF_INET, socket.AF_INET6])
def port(request, stack: ExitStack) -> socket.socket:
    """A socket that listens."""
    listening = stack.enter_context(closing(socket.socket(request.param)))
    try:
        listening.bind(("::1" if request.param == socket.AF_INET6 else "127.0.0.1", 0))
    except OSError as error:
        pytest.skip(f"no such address here: {error}")
    listening.listen()
    return listening


def connected(port: socket.socket, stack: ExitStack) -> Pair:
    ours = stack.enter_context(closing(socket.create_connection(port.getsockname()[:2])))
    theirs, _ = port.accept()
    ours.settimeout(20)
    return ours, stack.enter_context(closing(theirs))


def watched(port: socket.socket) -> Intake:
    return Intake(port.getsockname()[1], strangers_bytes=BOUND)


def look(watching: Intake) -> None:
    for _ in range(LOOKS):
        watching.look()


def call_of(pair: Pair) -> grpc.ServicerContext:
    host, port, *_ = pair[0].getsockname()
    named = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return SimpleNamespace(peer=lambda: named)


def is_cut(pair: Pair) -> bool:
    pair[1].setblocking(False)
    try:
        pair[1].send(b"still here")
    except OSError:
        return True
    while data := pair[0].recv(2**16):
        if data.endswith(b"still here"):
            return False
    return True


def test_whoever_sends_the_most_that_no_call_asked_for_is_cut_and_no_other(port, stack) -> None:
    loud, quiet = connected(port, stack), connected(port, stack)
    watching = watched(port)
    loud[0].sendall(bytes(BOUND))
    quiet[0].sendall(bytes(BOUND // 8))
    look(watching)
    assert is_cut(loud)
    assert not is_cut(quiet)


def test_many_that_send_little_are_bounded_together(port, stack) -> None:
    pairs = [connected(port, stack) for _ in range(8)]
    watching = watched(port)
    for ours, _ in pairs:
        ours.sendall(bytes(BOUND // 4))
    look(watching)
    assert sum(not is_cut(pair) for pair in pairs) <= 1


def test_what_handlers_read_is_not_counted_however_much_it_is(port, stack) -> None:
    pair = connected(port, stack)
    watching = watched(port)
    for _ in range(5):
        pair[0].sendall(bytes(BOUND))
        assert [len(m) for m in watching.count(iter([bytes(BOUND)]), call_of(pair))] == [BOUND]
        look(watching)
    assert not is_cut(pair)


def test_what_was_answered_is_not_counted(port, stack) -> None:
    pair = connected(port, stack)
    watching = watched(port)
    for _ in range(5):
        pair[1].sendall(bytes(BOUND))
        pair[0].sendall(bytes(BOUND))
        look(watching)
    assert not is_cut(pair)


def test_an_admitted_call_may_send_a_message_of_its_method_and_not_more(
    port, stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "UNASKED_BYTES", BOUND)
    pair, greedy = connected(port, stack), connected(port, stack)
    watching = watched(port)
    with (
        watching.expect(call_of(pair), METHOD),
        watching.expect(call_of(greedy), METHOD),
    ):
        pair[0].sendall(bytes(METHOD.most_bytes))
        greedy[0].sendall(bytes(METHOD.most_bytes + BOUND + 1))
        look(watching)
        assert not is_cut(pair)
        assert is_cut(greedy)
    look(watching)  # what the call did not read is gone with it
    assert not is_cut(pair)


def test_the_connections_of_calls_that_are_dropped_are_cut(port, stack) -> None:
    removed, other = connected(port, stack), connected(port, stack)
    watched(port).drop([call_of(removed)])
    assert is_cut(removed)
    assert not is_cut(other)


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2: one of settings (4) for the connection, others for its first stream."""
    stream = 0 if kind == 4 else 1
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, 0, stream) + payload


def pour(peer: socket.socket, data: bytes) -> None:
    """Send the same again and again until the other end closes."""
    peer.setblocking(False)
    left, sent_bytes = memoryview(b""), 0
    while sent_bytes < 2**29:
        left = left or memoryview(data)
        readable, writable, _ = select.select([peer], [peer], [], 60)
        try:
            if readable and not peer.recv(2**16):
                return
            if writable:
                sent = peer.send(left)
                left, sent_bytes = left[sent:], sent_bytes + sent
        except ConnectionError:
            return
    raise AssertionError("nobody stops it")


def test_headers_without_an_end_are_cut_and_members_are_served(caplog) -> None:
    host = Listener("127.0.0.1:0", None)
    with host, HostClient(host.address, deadline_s=60) as member:
        address, _, port = host.address.rpartition(":")
        with closing(socket.create_connection((address, int(port)))) as attacker:
            attacker.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4) + frame(1, b"\x83"))
            pour(attacker, frame(9, 1000 * b"\x00\x01a\x01b"))  # our settings are never agreed to
        member.echo(bytes(8 * 2**20))
    assert "(port " in caplog.text  # it was not gRPC that cut it


def test_a_short_message_does_not_become_a_long_one() -> None:
    sized = Method("Sized")
    answers = {sized: lambda messages, _: str(len(next(messages))).encode()}
    with (
        Server("127.0.0.1:0", answers, threads=1, most_calls=2) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        squeezed = sized.bind(channel)(bytes(2**20), compression=grpc.Compression.Gzip)
    assert int(squeezed) < 2**14
