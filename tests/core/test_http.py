"""What strangers send to a server of few clients costs it neither memory nor its other clients."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from typing import Any

import pytest

from collapipe_flwr.core import http
from collapipe_flwr.core.http import BoundedRequest, FewClientsServer
from collapipe_flwr.core.processes import run_beside

_ANSWER_S = 30.0


class Greeting(BoundedRequest):
    """Answers every request."""

    def do_GET(self) -> None:  # noqa: N802 - as http.server names it
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"hi")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FewClientsServer]:
    monkeypatch.setattr(http, "MOST_CLIENTS", 3)
    serving = FewClientsServer("127.0.0.1", 0, Greeting)
    with run_beside(lambda _: serving.serve_forever(0.01), "http"):
        yield serving
        serving.shutdown()
        serving.server_close()


def connected(server: FewClientsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), _ANSWER_S)


def status(server: FewClientsServer) -> int:
    with closing(HTTPConnection("127.0.0.1", server.server_port, timeout=_ANSWER_S)) as asking:
        asking.request("GET", "/")
        return asking.getresponse().status


def told(client: Any) -> bytes:
    """All that comes until the connection ends."""
    try:
        return b"".join(iter(lambda: client.recv(65536), b""))
    except ConnectionError:  # closed before all that was sent had been read
        return b""


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"x" * 10**6,
        b"GET / HTTP/1.1\r\nCookie: " + b"x" * 10**6,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10**5,
        b"\x16\x03\x01\x02\x00\x01\x00" + b"\xff" * 10**6,
    ],
    ids=["path", "header", "headers", "tls"],
)
def test_endless_requests_are_cut_off(server: FewClientsServer, request_: bytes) -> None:
    with connected(server) as client:
        with suppress(ConnectionError):
            client.sendall(request_)
        assert b"hi" not in told(client)
    assert status(server) == 200


def test_the_thousandth_client_is_sent_away_and_the_first_served(
    server: FewClientsServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        first, *_ = [stack.enter_context(connected(server)) for _ in range(3)]
        for _ in range(300):
            with connected(server) as late:
                assert told(late).startswith(b"HTTP/1.0 503 ")
        first.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert told(first).endswith(b"hi")
    assert capfd.readouterr().err == ""


def test_a_request_that_never_ends_is_given_up(
    server: FewClientsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "REQUEST_S", 0.05)
    with connected(server) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: lo")
        assert told(client) == b""
