"""An HTTP server for a few clients, with bounds on their number, requests and time.

A client is served or refused at once, so that none blocks others or fills the memory of the
process, which serves beside its main work.
"""

from __future__ import annotations

import socket
import sys
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO

MOST_CLIENTS = 32
REQUEST_S = 10.0  # within which a client must send its request
_SEND_S = 10.0  # within which it must accept a part of an answer
_REQUEST_BYTES = 32 * 1024
_REFUSE_S = 1.0


class FewClientsServer(ThreadingHTTPServer):
    """One thread for each client, up to a limit; raises OSError where it cannot listen."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CLIENTS

    def __init__(self, host: str, port: int, handler: type[BoundedRequest]) -> None:
        self.clients = threading.BoundedSemaphore(MOST_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without the base class's look-up of this machine's name."""
        super(ThreadingHTTPServer, self).server_bind()
        self.server_port = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a client, or answer that too many are connected."""
        if self.clients.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(_REFUSE_S)
            request.sendall(b"HTTP/1.0 503 Too many clients\r\nRetry-After: 5\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that left or were refused."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class BoundedRequest(BaseHTTPRequestHandler):
    """One request; the connection is closed behind it."""

    timeout = _SEND_S
    server_version, sys_version = "collapipe", ""

    def setup(self) -> None:
        """Start the timer within which the request must arrive."""
        super().setup()
        self.rfile: Any = _Bounded(self.rfile, _REQUEST_BYTES)
        self._late = threading.Timer(REQUEST_S, self._cut_off)
        self._late.daemon = True
        self._late.start()

    def parse_request(self) -> bool:
        """Read the request, and stop the timer."""
        try:
            return super().parse_request()
        finally:
            self._late.cancel()

    def finish(self) -> None:
        self._late.cancel()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: strangers' requests would fill the log, and URLs may hold a secret."""

    def _cut_off(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class _Bounded:
    """The lines of a request of at most ``most_bytes``; raises ConnectionError for more."""

    def __init__(self, file: BinaryIO, most_bytes: int) -> None:
        self._file, self._left = file, most_bytes

    def readline(self, size: int) -> bytes:
        line = self._file.readline(min(size, self._left + 1))
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionAbortedError("a longer request than any page or scraper sends")
        return line

    def close(self) -> None:
        self._file.close()
