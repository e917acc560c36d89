"""Serves the page of a run, and its updates as Server-Sent Events.

There is nothing else to request, and nothing to change. Requests with a foreign host name are
refused (DNS rebinding), and other sites may not read answers (no CORS headers). Beyond loopback,
every request needs the token.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import is_loopback
from collapipe_flwr.core.processes import meanwhile
from collapipe_flwr.reporting.live.feed import Feed
from collapipe_flwr.reporting.live.state import Place
from collapipe_flwr.reporting.report.page import plotly_js
from collapipe_flwr.reporting.report.template import CSS, SCRIPT

_REQUEST_S = 10.0  # within which a client must send its request
_SEND_S = 10.0  # within which it must accept an answer
_PING_S = 5.0  # a page without pings connects again
_MOST_CLIENTS = 32
_PORT = re.compile(r":\d*$")
_RETRY_MS = 1000  # after which a page whose stream broke off connects again
_SCRIPTS = ("numbers.js", "clusters.js", "figures.js", "live.js")


def token_for(host: str) -> str:
    """What requests to a server at ``host`` must hold; empty where it is on loopback."""
    return "" if is_loopback(host) else secrets.token_urlsafe(16)


class LiveServer(ThreadingHTTPServer):
    """One thread per open page, up to a limit."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MOST_CLIENTS

    def __init__(self, feed: Feed, host: str = "127.0.0.1", port: int = 0) -> None:
        """Raises ConfigError where it cannot listen."""
        self.feed, self.host, self.token = feed, host, token_for(host)
        self.clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there ({error.strerror}); "
                "choose another, or port 0 for a free one"
            ) from error

    @property
    def url(self) -> str:
        """What to open in a browser."""
        host = socket.gethostname() if self.host in ("", "0.0.0.0", "::") else self.host
        shown = f"[{host}]" if ":" in host else host
        query = f"?token={self.token}" if self.token else ""
        return f"http://{shown}:{self.server_port}/{query}"

    def server_bind(self) -> None:
        """Bind without the base class's look-up of this machine's name."""
        super(ThreadingHTTPServer, self).server_bind()

    @contextmanager
    def serving(self) -> Iterator[None]:
        with meanwhile(lambda _: self.serve_forever(0.1), "http"):
            try:
                yield
            finally:
                self.shutdown()
                self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a client, or answer that too many are connected."""
        if self.clients.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(1.0)
            request.sendall(b"HTTP/1.0 503 Too many pages are open\r\nRetry-After: 5\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore pages that were closed or stopped reading."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection is closed behind it."""

    server: LiveServer
    timeout = _SEND_S
    server_version, sys_version = "collapipe", ""

    def setup(self) -> None:
        """Start the clock within which the request must be there."""
        super().setup()
        self._late = threading.Timer(_REQUEST_S, self._cut_off)
        self._late.daemon = True
        self._late.start()

    def parse_request(self) -> bool:
        """Read the request; the clock stops when it is there."""
        try:
            return super().parse_request()
        finally:
            self._late.cancel()

    def do_GET(self) -> None:
        """Check the host name and the token, then answer."""
        path, _, text = self.path.partition("?")
        query = {key: values[-1] for key, values in parse_qs(text).items()}
        token = query.get("token", "").encode()
        if not self._is_for_us():
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "Unknown host name")
        elif not secrets.compare_digest(token, self.server.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "Open the URL that `collapipe watch` printed")
        else:
            self._answer(path, query)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: URLs hold the token."""

    def _is_for_us(self) -> bool:
        """Whether it was sent to an address, which cannot be redirected, or to a name of ours."""
        name = _PORT.sub("", self.headers.get("Host", "")).strip("[]").lower()
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return name in ("localhost", self.server.host.lower(), socket.gethostname().lower())

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        match path:
            case "/":  # the policy of the page allows scripts with its nonce only
                nonce = secrets.token_urlsafe(16)
                page = _page().replace("<script>", f'<script nonce="{nonce}">')
                self._send("text/html", page, nonce)
            case "/events":
                self._events(query)
            case "/report":
                self._send("application/json", self.server.feed.figures.text())
            case "/plotly.js":
                with suppress(ConfigError):  # plotly is not installed: `/report` says it
                    self._send("text/javascript", plotly_js())
            case _:
                self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, kind: str, text: str, nonce: str = "") -> None:
        content = text.encode()
        self._begin(f"{kind}; charset=utf-8", nonce, len(content))
        self.wfile.write(content)

    def _events(self, query: Mapping[str, str]) -> None:
        """Send all that the page lacks, then updates, until it disconnects."""
        known = Place.of_text(self.headers.get("Last-Event-ID") or query.get("last", ""))
        self._begin("text/event-stream; charset=utf-8")
        self.wfile.write(f"retry: {_RETRY_MS}\n\n".encode())
        with suppress(EOFError):
            while True:
                news = self.server.feed.next(known, _PING_S)
                if news is None:
                    self.wfile.write(b"event: ping\ndata:\n\n")
                else:
                    known, text = news
                    self.wfile.write(f"id: {known}\ndata: {text}\n\n".encode())

    def _begin(self, kind: str, nonce: str = "", length: int | None = None) -> None:
        """Headers: the page runs only its own script, connects only here, and is not framed."""
        own = f"script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; " if nonce else ""
        policy = f"default-src 'none'; {own}connect-src 'self'; img-src data:"
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def _cut_off(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


@cache
def _page() -> str:
    """The page with the report's style and script and its own; it loads nothing else."""
    text = _part("live.html")
    text = text.replace("<!-- style -->", f"<style>{CSS}{_part('live.css')}</style>")
    script = SCRIPT + "".join(map(_part, _SCRIPTS))
    return text.replace("<!-- script -->", f"<script>{script}</script>")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
