"""Devices as hosts: control unit -> device 1 -> device 2 -> edge, every hop over gRPC."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
import torch
from torch import Tensor

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.config import NextHop
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.transport import server
from collapipe_flwr.transport.client import Dialer, HostClient
from tests.closeness import assert_near, near
from tests.host.certificates import Authority
from tests.host.chain_to_edge import request, session_key
from tests.pipeline.chains import (
    DEADLINE_S,
    SGD,
    Head,
    Segment,
    make_batch,
    make_blocks,
    make_parts,
    settings,
    whole_loss,
)

NAMES = ("device 1", "device 2", "edge")


PLAIN = dict.fromkeys(("control unit", *NAMES))


def build(asked, weights):
    placed = asked.placement
    part = Segment(make_blocks(placed.blocks[1] - placed.blocks[0])) if placed else Head()
    part.load_weights(weights)
    return part


class Hosts:
    """Three servers and their clients, each server reaching the next."""

    def __init__(self, stack: ExitStack, tls=PLAIN) -> None:
        services = [HostService(build, connect=Dialer(name=n, tls=tls[n])) for n in NAMES]
        self.servers = [
            stack.enter_context(HostServer("127.0.0.1:0", service, tls=tls[name]))
            for name, service in zip(NAMES, services, strict=True)
        ]
        self.clients = [
            stack.enter_context(HostClient(server.address, tls=tls["control unit"]))
            for server in self.servers
        ]

    def open(self, parts) -> None:
        cut = ((0, 2), (2, 3), None)
        for index, (client, blocks) in enumerate(zip(self.clients, cut, strict=True)):
            hops = None
            if blocks is not None:
                address = self.servers[index + 1].address
                hops = (NextHop(address=address, key=session_key(), name=NAMES[index + 1]),)
            client.open_session(request(name=NAMES[index], blocks=blocks, next_hops=hops))
            client.get_session(session_key()).push_weights(parts[index + 1].state_dict())


def first_stage(part, link) -> FirstStage:
    optimizer = Optimizer(SGD, part.named_parameters())
    return FirstStage(part, optimizer, settings("control unit", "1f1b", 4), downstream=link)


@pytest.mark.parametrize("secure", [False, True])
def test_a_chain_of_hosts_equals_one_process(secure, tmp_path):
    parts, wholes, batch = make_parts((2, 1)), make_parts((2, 1)), make_batch((3, 3, 2))
    authority = Authority(tmp_path)
    members = {n: authority.issue(n.replace(" ", "")) for n in ("control unit", *NAMES)}
    with ExitStack() as stack:
        hosts = Hosts(stack, members) if secure else Hosts(stack)
        hosts.open(parts)
        link = hosts.clients[0].get_session(session_key()).stream()
        first = first_stage(parts[0], link)
        losses = [first.train_step(batch).loss for _ in range(2)]
        first.finish()
        link.close()
        for part, client in zip(parts[1:], hosts.clients, strict=True):
            part.load_weights(client.get_session(session_key()).fetch_weights())
        reports = [client.get_session(session_key()).report() for client in hosts.clients]
    optimizer = Optimizer(SGD, torch.nn.ModuleList(wholes).named_parameters())
    expected = []
    for _ in range(2):
        loss = whole_loss(wholes, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == near(expected)
    for part, whole in zip(parts, wholes, strict=True):
        assert_near(list(part.parameters()), list(whole.parameters()))
    assert [r.name for r in reports] == list(NAMES)
    assert reports[0].sent_down.bytes == reports[1].received_up.bytes > 0


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_host_is_heard_at_the_control_unit(lost):
    parts = make_parts((2, 1))
    with ExitStack() as stack:
        hosts = Hosts(stack)
        hosts.open(parts)
        link = hosts.clients[0].get_session(session_key()).stream()
        first = first_stage(parts[0], link)
        first.train_step(make_batch((3, 2)))
        start = time.monotonic()
        hosts.servers[lost].stop(grace_s=0.1)
        with pytest.raises(LinkError):
            for _ in range(100):
                first.train_step(make_batch((3, 2)))
        assert time.monotonic() - start < DEADLINE_S / 2
        link.close()


class StuckHead(Head):
    """Never comes back from its forward pass until it is `freed`."""

    entered, freed = threading.Event(), threading.Event()

    def forward(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        self.entered.set()
        assert self.freed.wait(DEADLINE_S)
        return super().forward(hidden_BTD, context)


def test_a_device_stops_while_the_next_host_says_nothing(monkeypatch, caplog):
    parts = make_parts((1,))
    monkeypatch.setattr(server, "_END_S", 5.0)

    def build_stuck(_asked, weights):
        head = StuckHead()
        head.load_weights(weights)
        return head

    with ExitStack() as stack:
        edge = stack.enter_context(HostServer("127.0.0.1:0", HostService(build_stuck)))
        stack.callback(StuckHead.freed.set)
        service = HostService(build, connect=Dialer(name="device 1"))
        device = stack.enter_context(HostServer("127.0.0.1:0", service))
        hop = NextHop(address=edge.address, key=session_key())
        for host, part, placed in ((edge, parts[2], {}), (device, parts[1], {"next_hops": (hop,)})):
            client = stack.enter_context(HostClient(host.address))
            session = client.open_session(request(**placed))
            session.push_weights(part.state_dict())
        first = first_stage(parts[0], stack.enter_context(closing(session.stream())))
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(first.train_step, make_batch((3,)))
            assert StuckHead.entered.wait(DEADLINE_S)
            start = time.monotonic()
            device.stop(grace_s=0.1)
            assert time.monotonic() - start < 20.0
            with pytest.raises(LinkError):
                step.result(DEADLINE_S)
        assert "did not end" not in caplog.text
        edge.stop(grace_s=0.1)
        assert "stages did not end within 5 s" in caplog.text


def test_a_next_host_that_is_not_there_is_named_at_the_control_unit():
    parts = make_parts((2, 1))
    with ExitStack() as stack:
        hosts = Hosts(stack)
        hosts.open(parts)
        hosts.servers[1].stop(grace_s=0.1)
        with pytest.raises(LinkError, match=f"device 2 at {hosts.servers[1].address}"):
            link = stack.enter_context(
                closing(hosts.clients[0].get_session(session_key()).stream())
            )
            first = first_stage(parts[0], link)
            for _ in range(100):
                first.train_step(make_batch((3, 2)))


def test_a_paced_link_is_paced_both_ways():
    rate_bytes_per_s = 30_000.0
    rate = 8 * rate_bytes_per_s
    parts = make_parts((2,))
    config = LinkConfig(forward_bit_per_s=rate, backward_bit_per_s=rate)
    with (
        HostServer("127.0.0.1:0", HostService(build)) as server,
        HostClient(server.address) as client,
    ):
        client.open_session(request())
        client.get_session(session_key()).push_weights(parts[2].state_dict())
        link = client.get_session(session_key()).stream(config=config)
        optimizer = Optimizer(SGD, parts[0].named_parameters())
        order = settings("control unit", "gpipe", 2)  # all gradients come after all outputs
        first = FirstStage(parts[0], optimizer, order, downstream=link)
        start = time.monotonic()
        first.train_step(make_batch((64, 64)))
        seconds = time.monotonic() - start
        there, back = link.sent.bytes, link.received.bytes
        first.finish()
        link.close()
    assert back / rate_bytes_per_s > 1  # enough to be told from none at all
    assert seconds >= 0.95 * (there + back) / rate_bytes_per_s
