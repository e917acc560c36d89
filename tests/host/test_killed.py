"""The edge stops, is killed or hangs in the middle of a step: every stage hears in time."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from collapipe_flwr.core.errors import LinkError, LinkTimeout
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.transport.client import HostClient
from tests.forked import start
from tests.host.chain_to_edge import Cluster, open_session, request, service, session_key
from tests.pipeline.chains import DEADLINE_S, make_batch, make_parts


class _Trigger:
    """Calls `action` once when the device has computed its `call`-th micro-batch."""

    def __init__(self, part, action, call: int = 2) -> None:
        self._plain, self._action, self._call = part.forward, action, call
        self.fired_s = 0.0
        part.forward = self

    def __call__(self, *args):
        output = self._plain(*args)
        self._call -= 1
        if self._call == 0:
            self.fired_s = time.monotonic()
            self._action()
        return output


@pytest.fixture
def edge_process():
    process = start("tests.host.edge_process", env=os.environ)
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(60)
    process.stdout.close()


def run_until_it_breaks(address: str, action, deadline_s: float = DEADLINE_S):
    """Trains until `action` broke the edge; returns both errors and the seconds since."""
    parts = make_parts((2,))
    with HostClient(address, deadline_s=DEADLINE_S) as client:
        open_session(client, parts[2])
        cluster = Cluster(parts, client.get_session(session_key()).stream(), deadline_s=deadline_s)
        trigger = _Trigger(parts[1], action)
        with pytest.raises(LinkError) as caught, cluster.running() as first:
            for _ in range(1000):
                first.train_step(make_batch((2, 2, 2, 2)))
        seconds = time.monotonic() - trigger.fired_s
    return caught.value, cluster.failure, seconds


def test_a_killed_edge_process_is_noticed_at_once(edge_process):
    address = edge_process.stdout.readline().strip()
    error, failure, seconds = run_until_it_breaks(address, edge_process.kill)
    assert f"edge at {address}" in str(error)
    assert f"edge at {address}" in str(failure)
    assert seconds < DEADLINE_S / 2


def test_a_hanging_edge_process_is_given_up_at_the_deadline(edge_process):
    address = edge_process.stdout.readline().strip()

    def hang():
        edge_process.send_signal(signal.SIGSTOP)

    error, failure, seconds = run_until_it_breaks(address, hang, deadline_s=3.0)
    assert isinstance(failure, LinkTimeout) or isinstance(error, LinkTimeout)
    assert seconds < DEADLINE_S / 2


def test_an_edge_that_restarts_takes_a_new_session_for_the_same_cluster(edge_process):
    address = edge_process.stdout.readline().strip()
    head = make_parts((1,))[2]
    with HostClient(address, deadline_s=DEADLINE_S, patience_s=DEADLINE_S) as client:
        open_session(client, head)
        edge_process.kill()
        edge_process.wait(60)
        again = start("tests.host.edge_process", address, env=os.environ)
        try:
            client.attempt_patiently(lambda: client.open_session(request("c2"))).push_weights(
                head.state_dict()
            )
            found = client.get_session(session_key("c2")).fetch_weights()
            assert all(torch.equal(found[key], t) for key, t in head.state_dict().items())
            with pytest.raises(LinkError, match="no session c1"):
                client.get_session(session_key()).fetch_weights()
        finally:
            again.kill()
            again.wait(60)
            again.stdout.close()


def test_a_stopped_server_is_noticed():
    server = HostServer("127.0.0.1:0", service())
    with server:
        stopper = threading.Thread(target=server.stop, kwargs={"grace_s": 0.1})
        error, _, seconds = run_until_it_breaks(server.address, stopper.start)
        stopper.join(DEADLINE_S)
    assert "edge at" in str(error)
    assert seconds < DEADLINE_S / 2


def test_a_client_that_vanishes_frees_its_session():
    with HostServer("127.0.0.1:0", service()) as server:
        client = HostClient(server.address)
        open_session(client, make_parts((1,))[2])
        client.get_session(session_key()).stream()
        client.close()
        with HostClient(server.address) as watcher:
            until = time.monotonic() + DEADLINE_S
            while watcher.ask_health().sessions and time.monotonic() < until:
                time.sleep(0.02)
            assert watcher.ask_health().sessions == 0
