"""Who may ask the live server for what, and how long it bears with whom."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core import http as http_server
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.live import server as live
from collapipe_flwr.reporting.live.feed import Feed
from collapipe_flwr.reporting.live.server import LiveServer, token_for
from tests.reporting.made_up_runs import MadeUpRun

_ANSWER_S = 30.0


@contextmanager
def _serving(run: Path, host: str = "127.0.0.1") -> Iterator[LiveServer]:
    feed = Feed(lambda: run)
    server = LiveServer(feed, host)
    with server.serve(), feed.follow():
        yield server


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    made = MadeUpRun(tmp_path / "run")
    made.end_round()
    return made


@pytest.fixture
def server(run: MadeUpRun) -> Iterator[LiveServer]:
    with _serving(run.path) as serving:
        yield serving


def _connection(server: LiveServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=_ANSWER_S)


def _ask(server: LiveServer, path: str, host: str = "", method: str = "GET") -> tuple[int, str]:
    with closing(_connection(server)) as connection:
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


@contextmanager
def _stream(server: LiveServer) -> Iterator[Iterator[dict[str, str]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=_ANSWER_S)
    connection.request("GET", "/events")
    answer = connection.getresponse()
    try:
        yield _messages(answer)
    finally:
        answer.close()
        connection.close()


def _messages(answer: Any) -> Iterator[dict[str, str]]:
    message: dict[str, str] = {}
    for line in answer:
        key, _, value = line.decode().rstrip("\n").partition(": ")
        if key:
            message[key] = value
        elif message:
            yield message
            message = {}


def _news(stream: Iterator[dict[str, str]]) -> dict[str, Any]:
    return json.loads(next(m for m in stream if "data" in m)["data"])


def test_the_page_holds_all_that_it_runs(server: LiveServer) -> None:
    status, text = _ask(server, "/")
    assert status == 200
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert text.count("<script nonce=") == 1


@pytest.mark.parametrize(
    "path",
    ["/events.jsonl", "/../events.jsonl", "//etc/passwd", "/%2e%2e/", "/run-config.json", "x"],
)
def test_files_cannot_be_asked_for(server: LiveServer, path: str) -> None:
    assert _ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_can_be_changed(server: LiveServer, method: str) -> None:
    assert _ask(server, "/", method=method)[0] == 501


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost", "LOCALHOST:1", "[::1]:80"])
def test_addresses_and_own_names_are_answered(server: LiveServer, host: str) -> None:
    assert _ask(server, "/report", host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "localhost.evil:1"])
@pytest.mark.parametrize("path", ["/", "/events", "/report", "/plotly.js"])
def test_a_page_from_elsewhere_under_our_address_is_refused(
    server: LiveServer, host: str, path: str
) -> None:
    """DNS rebinding: the browser believes that the foreign name is this machine."""
    assert _ask(server, path, host)[0] == 421


def test_other_sites_may_not_read_answers(server: LiveServer) -> None:
    with closing(_connection(server)) as connection:
        connection.request("GET", "/report", headers={"Origin": "http://evil.example"})
        answer = connection.getresponse()
        answer.read()
    assert answer.getheader("Access-Control-Allow-Origin") is None
    assert "frame-ancestors 'none'" in str(answer.getheader("Content-Security-Policy"))


def test_a_token_is_needed_beyond_loopback_alone(run: MadeUpRun) -> None:
    assert [token_for(host) for host in ("127.0.0.1", "::1", "localhost")] == ["", "", ""]
    with _serving(run.path, "0.0.0.0") as server:
        assert server.url.endswith(f"?token={server.token}")
        for path in ("/", "/events", "/report", "/plotly.js", "/?token=x", "/?token=%C3%A9"):
            assert _ask(server, path)[0] == 403
        assert _ask(server, f"/?token={server.token}")[0] == 200
        assert server.token not in repr(server)


def test_rounds_arrive_as_they_end(server: LiveServer, run: MadeUpRun) -> None:
    with _stream(server) as stream:
        while (news := _news(stream))["last"] is None:
            pass
        assert news["last"]["round"] == 1
        run.end_round()
        assert _news(stream)["last"]["round"] == 2


def test_a_client_that_does_not_say_what_it_wants_is_cut_off(
    run: MadeUpRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    with (
        _serving(run.path) as server,
        socket.create_connection(("127.0.0.1", server.server_port), _ANSWER_S) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")  # and no empty line
        assert client.recv(1) == b""


def test_too_many_clients_are_told_so(run: MadeUpRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MOST_CLIENTS", 2)
    monkeypatch.setattr(live, "_PING_S", 0.05)  # a client that left is noticed by then
    with _serving(run.path) as server:
        with _stream(server) as first, _stream(server) as second:
            next(first), next(second)
            assert _ask(server, "/")[0] == 503
        deadline = time.monotonic() + _ANSWER_S
        while _ask(server, "/report")[0] != 200:
            assert time.monotonic() < deadline, "nobody is let in after the others left"


def test_an_address_that_is_taken_is_named(server: LiveServer) -> None:
    with pytest.raises(ConfigError, match=f"--port {server.server_port}: cannot listen there"):
        LiveServer(server.feed, port=server.server_port)


def test_streams_end_with_the_server(run: MadeUpRun) -> None:
    with _serving(run.path) as server:
        connection = _connection(server)
        connection.request("GET", "/events")
        answer = connection.getresponse()
    with closing(connection), answer:
        answer.read()  # to its end
