"""``/metrics``: what a collector knows just now, to whoever scrapes, in OpenMetrics where asked."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from collapipe_flwr.core.errors import ConfigError, blaming, extra
from collapipe_flwr.core.links import host_and_port

LOOPBACK = "127.0.0.1"


def metrics_place(text: str) -> tuple[str, int]:
    """``HOST:PORT``, or a port on loopback. Raises ConfigError."""
    alone = text.removeprefix(":")
    return host_and_port(f"{LOOPBACK}:{alone}" if alone.isdecimal() else text, least=0)


def check_address(text: str) -> None:
    """Raise ConfigError for an address that makes no sense or cannot be had now."""
    host, port = metrics_place(text)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise _taken(text, error) from error


def _taken(text: str, error: OSError) -> ConfigError:
    return ConfigError(f"nothing can listen at {text} ({error.strerror}); choose another")


@contextmanager
def serving_metrics(address: str, collector: Any) -> Iterator[None]:
    """Serve a daemon's numbers, if it has an address for them; raises ConfigError."""
    if not address:
        yield
        return
    with blaming("--metrics"):
        server = MetricsServer(address, collector)
    try:
        yield
    finally:
        server.close()


class MetricsServer:
    """Serves ``collector``, an object with prometheus_client's ``collect``, from a thread.

    Raises ConfigError without prometheus_client, or where the address cannot be had.
    """

    def __init__(self, address: str, collector: Any) -> None:
        with extra("prometheus"):
            from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
        host, port = metrics_place(address)
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, processor time and open files
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise _taken(address, error) from error
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
