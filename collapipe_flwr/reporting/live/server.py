"""Serves the page of a run, and what is new on it as Server-Sent Events.

Nothing else can be asked for, and nothing can be changed. Requests under a foreign name are refused
(a page from elsewhere whose name was made to mean this machine: DNS rebinding), and no other site
may read answers, as none allows it (CORS). Beyond loopback, every request needs the token.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import is_loopback
from collapipe_flwr.reporting.live.feed import Feed
from collapipe_flwr.reporting.live.state import Place
from collapipe_flwr.reporting.report.page import plotly_js
from collapipe_flwr.reporting.report.script import SCRIPT
from collapipe_flwr.reporting.report.template import CSS

_REQUEST_S = 10.0  # that a client has to say what it wants
_SEND_S = 10.0  # that it may take to accept what is sent
_PING_S = 5.0  # a page that hears less connects again
_MOST_CLIENTS = 32
_PORT = re.compile(r":\d*$")
_RETRY_MS = 1000  # after which a page whose stream broke off connects again
_SCRIPTS = ("numbers.js", "clusters.js", "figures.js", "live.js")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Where to listen; ``token`` is empty on loopback alone."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)

    @staticmethod
    def at(host: str, port: int) -> Bind:
        """With a token unless only this machine can connect."""
        return Bind(
            host=host, port=port, token="" if is_loopback(host) else secrets.token_urlsafe(16)
        )

    def url(self, port: int) -> str:
        """What to open in a browser."""
        anywhere = self.host in ("", "0.0.0.0", "::")
        host = socket.gethostname() if anywhere else self.host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{port}/" + (f"?token={self.token}" if self.token else "")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class LiveServer(ThreadingHTTPServer):
    """One thread per page that is open, and a bound on them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = _MOST_CLIENTS

    def __init__(self, feed: Feed, bind: Bind) -> None:
        """Raises ConfigError where it cannot listen."""
        self.feed, self.bind = feed, bind
        self.clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
        try:
            super().__init__((bind.host, bind.port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"--host {bind.host} --port {bind.port}: cannot listen there ({error.strerror}); "
                "choose another, or port 0 for a free one"
            ) from error

    @property
    def url(self) -> str:
        """What to open in a browser."""
        return self.bind.url(self.server_port)

    def server_bind(self) -> None:
        """Without the look-up of this machine's name that the base class makes."""
        super(ThreadingHTTPServer, self).server_bind()

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer while the body runs."""
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="http", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for a client, or an answer that says that too many are connected."""
        if self.clients.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(1.0)
            request.sendall(b"HTTP/1.0 503 Too many pages are open\r\nRetry-After: 5\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one client."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed, or that took nothing for long, is no error."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection is closed behind it."""

    server: LiveServer
    timeout = _SEND_S
    server_version, sys_version = "collapipe", ""

    def setup(self) -> None:
        """A client that says too slowly what it wants is cut off."""
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
        """Answer what a page asks for."""
        path, _, text = self.path.partition("?")
        query = {key: values[-1] for key, values in parse_qs(text).items()}
        answer = self._answers.get(path)
        token = query.get("token", "").encode()
        if not self._is_for_us():
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "Unknown host name")
        elif not secrets.compare_digest(token, self.server.bind.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "Open the URL that `collapipe watch` printed")
        elif answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
        else:
            with suppress(ConfigError):  # an extra that is not installed: `/report` says it
                answer(query)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: URLs hold the token."""

    def _is_for_us(self) -> bool:
        """Whether it was sent to an address, which nobody can redirect, or to a name of ours."""
        name = _PORT.sub("", self.headers.get("Host", "")).strip("[]").lower()
        ours = ("localhost", self.server.bind.host.lower(), socket.gethostname().lower())
        return name in ours or _address(name) is not None

    @property
    def _answers(self) -> Mapping[str, Callable[[Mapping[str, str]], None]]:
        return {
            "/": lambda _: self._page(),
            "/events": self._events,
            "/report": lambda _: self._send("application/json", self.server.feed.figures.text()),
            "/plotly.js": lambda _: self._send("text/javascript", plotly_js()),
        }

    def _page(self) -> None:
        """The page, whose scripts run under a policy that names them by a nonce."""
        nonce = secrets.token_urlsafe(16)
        self._send("text/html", _page().replace("<script>", f'<script nonce="{nonce}">'), nonce)

    def _send(self, kind: str, text: str, nonce: str = "") -> None:
        content = text.encode()
        self._begin(f"{kind}; charset=utf-8", nonce, len(content))
        self.wfile.write(content)

    def _events(self, query: Mapping[str, str]) -> None:
        """Tell all that the page lacks, then what is new, until it goes away."""
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
        """Headers: the page runs its own script alone, talks to us alone, and is framed nowhere."""
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
    """The report's style and script, with what keeps them up to date; loads nothing else."""
    text = _part("live.html")
    text = text.replace("<!-- style -->", f"<style>{CSS}{_part('live.css')}</style>")
    script = SCRIPT + "".join(map(_part, _SCRIPTS))
    return text.replace("<!-- script -->", f"<script>{script}</script>")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
