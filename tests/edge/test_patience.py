"""A call that waits for an edge to restart outlives the missed heartbeat that comes meanwhile."""

from __future__ import annotations

import threading
import time

import pytest

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.heartbeat import Heartbeat
from collapipe_flwr.edge.server import EdgeServer
from collapipe_flwr.rpc.edge_client import EdgeClient
from tests.edge.chain_to_edge import TOKEN, service


def test_an_edge_that_restarts_after_the_heartbeat_gave_it_up_is_found_again() -> None:
    heartbeat = Heartbeat(period_s=0.3)
    with EdgeServer("127.0.0.1:0", service()) as first:
        address = first.address
        client = EdgeClient(address, deadline_s=5, patience_s=30, heartbeat=heartbeat)
        client.health()
    away_s, start_s = heartbeat.lost_after_s + 2.0, time.monotonic()
    back: list[EdgeServer] = []

    def restart() -> None:
        back.append(EdgeServer(address, service()))
        back[0].__enter__()

    timer = threading.Timer(away_s, restart)
    timer.start()
    try:
        with client, pytest.raises(LinkError, match="no session"):
            client.report("c1", TOKEN)
        assert away_s - 0.5 < time.monotonic() - start_s < away_s + 15
    finally:
        timer.join()
        back[0].stop()
