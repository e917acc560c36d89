"""A call that waits for an edge to restart outlives the missed heartbeat that comes meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import pytest

from collapipe_flwr.core.errors import LinkError, Unreachable
from collapipe_flwr.core.links import Heartbeat
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.transport.client import HostClient
from tests.host.chain_to_edge import service, session_key


def test_an_edge_that_restarts_after_the_heartbeat_gave_it_up_is_found_again() -> None:
    heartbeat = Heartbeat(period_s=0.3)
    with HostServer("127.0.0.1:0", service()) as first:
        address = first.address
        client = HostClient(address, deadline_s=5, patience_s=120, heartbeat=heartbeat)
        client.ask_health()
    away_s, start_s = heartbeat.lost_after_s + 2.0, time.monotonic()
    back: list[HostServer] = []

    def restart() -> None:
        back.append(HostServer(address, service()))
        back[0].__enter__()

    timer = threading.Timer(away_s, restart)
    timer.start()
    try:
        with client, pytest.raises(LinkError, match="no session"):
            client.get_session(session_key()).report()
        assert away_s - 0.5 < time.monotonic() - start_s < away_s + 100
    finally:
        timer.join()
        back[0].stop()


def test_an_edge_that_answers_but_breaks_calls_off_is_asked_ever_more_rarely() -> None:
    calls: list[float] = []

    def answer(_messages: Iterator[bytes], _context: grpc.ServicerContext) -> bytes:
        return b""

    def broken(_messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        calls.append(time.monotonic())
        context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    methods = {
        "Status": grpc.stream_unary_rpc_method_handler(answer),
        "Report": grpc.stream_unary_rpc_method_handler(broken),
    }
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("collapipe.Edge", methods),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    patience_s, start_s = 3.0, time.monotonic()
    try:
        with (
            HostClient(address, deadline_s=5, patience_s=patience_s) as client,
            pytest.raises(Unreachable, match="draining"),
        ):
            client.get_session(session_key()).report()
    finally:
        server.stop(0).wait(5)
    assert time.monotonic() - start_s >= patience_s - 0.2
    assert 3 <= len(calls) <= 8  # at 0, 0, 0.1, 0.3, 0.7, 1.5, 3.1 s, on a busy machine later
    gaps_s = [later - before for before, later in pairwise(calls)]
    pauses_s = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
    assert all(gap_s > 0.9 * pause_s for gap_s, pause_s in zip(gaps_s, pauses_s, strict=False))


def test_the_calls_of_many_sessions_wait_once_for_an_edge_that_is_away() -> None:
    with HostServer("127.0.0.1:0", service()) as server:
        address = server.address
    patience_s, sessions, start_s = 3.0, 8, time.monotonic()
    with HostClient(address, deadline_s=5, patience_s=patience_s) as client:
        for _ in range(sessions):
            with pytest.raises(Unreachable):
                client.get_session(session_key()).report()
        assert patience_s < time.monotonic() - start_s < sessions * patience_s / 2
