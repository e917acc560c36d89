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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from http import HTTPStatus
from importlib.resources import files
from urllib.parse import parse_qs

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.http import BoundedRequest, FewClientsServer
from collapipe_flwr.core.links import is_loopback
from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.reporting.live.feed import Feed
from collapipe_flwr.reporting.live.state import Place
from collapipe_flwr.reporting.report.page import plotly_js
from collapipe_flwr.reporting.report.template import CSS, SCRIPT

_PING_S = 5.0  # a page without pings connects again
_PORT = re.compile(r":\d*$")
_RETRY_MS = 1000  # after which a page whose stream broke off connects again
_SCRIPTS = ("numbers.js", "clusters.js", "figures.js", "live.js")


def token_for(host: str) -> str:
    """Draw the token that requests to ``host`` must hold; empty where it is on loopback."""
    return "" if is_loopback(host) else secrets.token_urlsafe(16)


class LiveServer(FewClientsServer):
    """One thread per open page, up to a limit."""

    def __init__(self, feed: Feed, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen at an address; raises ConfigError where it cannot."""
        self.feed, self.host, self.token = feed, host, token_for(host)
        try:
            super().__init__(host, port, _Handler)
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

    @contextmanager
    def serve(self) -> Iterator[None]:
        with run_beside(lambda _: self.serve_forever(0.1), "http"):
            try:
                yield
            finally:
                self.shutdown()
                self.server_close()


class _Handler(BoundedRequest):
    """One request of a page."""

    server: LiveServer

    def do_GET(self) -> None:  # noqa: N802 - as http.server names it
        """Check the host name and the token, then answer."""
        path, _, text = self.path.partition("?")
        token = parse_qs(text).get("token", [""])[-1].encode()
        if not self._is_for_us():
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, "Unknown host name")
        elif not secrets.compare_digest(token, self.server.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "Open the URL that `collapipe watch` printed")
        else:
            self._answer(path)

    def _is_for_us(self) -> bool:
        """Return whether it was sent to an IP address or to a name of ours.

        An IP address needs no look-up that a foreign site could redirect (DNS rebinding).
        """
        name = _PORT.sub("", self.headers.get("Host", "")).strip("[]").lower()
        with suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        return name in ("localhost", self.server.host.lower(), socket.gethostname().lower())

    def _answer(self, path: str) -> None:
        match path:
            case "/":  # the policy of the page allows scripts with its nonce only
                nonce = secrets.token_urlsafe(16)
                page = _page().replace("<script>", f'<script nonce="{nonce}">')
                self._send("text/html", page, nonce)
            case "/events":
                self._events()
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

    def _events(self) -> None:
        """Send the run as it is, then updates, until the page disconnects."""
        known = Place()
        self._begin("text/event-stream; charset=utf-8")
        self.wfile.write(f"retry: {_RETRY_MS}\n\n".encode())
        with suppress(EOFError):
            while True:
                news = self.server.feed.next(known, _PING_S)
                if news is None:
                    self.wfile.write(b"event: ping\ndata:\n\n")
                else:
                    known, text = news
                    self.wfile.write(f"data: {text}\n\n".encode())

    def _begin(self, kind: str, nonce: str = "", length: int | None = None) -> None:
        """Send headers: a page runs only its own script, connects only here, and is not framed."""
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


@cache
def _page() -> str:
    """Assemble the page with the report's style and script and its own; it loads nothing else."""
    text = _part("live.html")
    text = text.replace("<!-- style -->", f"<style>{CSS}{_part('live.css')}</style>")
    script = SCRIPT + "".join(map(_part, _SCRIPTS))
    return text.replace("<!-- script -->", f"<script>{script}</script>")


def _part(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
