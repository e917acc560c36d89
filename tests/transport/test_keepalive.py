"""A peer is lost when it is silent for as long as the heartbeat says, and never for being busy."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import Heartbeat
from collapipe_flwr.transport.keepalive import Keepalive, make_keepalive_options

ROOT = Path(__file__).parents[2]
HEARTBEAT = Heartbeat(period_s=0.5, misses=4)  # a starved host is not to be taken for lost
SLACK_S = 30.0  # of a machine that does much else
HOST = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from collapipe_flwr.transport.keepalive import make_server_keepalive_options
server = grpc.server(ThreadPoolExecutor(1), options=make_server_keepalive_options())
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
for line in sys.stdin:
    ctypes.PyDLL(None).sleep(int(line))  # a PyDLL keeps the interpreter's lock
    print("awake", flush=True)
"""


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOST],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


@contextmanager
def watched(port: int) -> Iterator[list[float]]:
    """When the host on that port was lost."""
    lost_s: list[float] = []
    connect = partial(grpc.insecure_channel, f"127.0.0.1:{port}", make_keepalive_options(HEARTBEAT))
    with Keepalive(connect, HEARTBEAT, lambda: lost_s.append(time.monotonic())):
        yield lost_s


def await_loss(lost_s: list[float], times: int, since_s: float) -> float:
    until_s = time.monotonic() + HEARTBEAT.lost_after_s + SLACK_S
    while len(lost_s) < times and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(lost_s) == times
    return lost_s[-1] - since_s


@pytest.mark.long
def test_a_suspended_host_is_lost_in_time_and_again_after_it_was_back(host) -> None:
    process, port = host
    with watched(port) as lost_s:
        for times in (1, 2):
            time.sleep(HEARTBEAT.lost_after_s)
            assert len(lost_s) == times - 1
            process.send_signal(signal.SIGSTOP)
            took_s = await_loss(lost_s, times, time.monotonic())
            assert HEARTBEAT.lost_after_s - 2 * HEARTBEAT.period_s < took_s
            time.sleep(HEARTBEAT.lost_after_s)
            assert len(lost_s) == times  # told once
            process.send_signal(signal.SIGCONT)


def test_a_host_whose_python_stands_still_is_not_lost(host) -> None:
    process, port = host
    with watched(port) as lost_s:
        process.stdin.write("5\n")
        process.stdin.flush()
        assert process.stdout.readline() == "awake\n"
        assert 2 * HEARTBEAT.lost_after_s < 5 and not lost_s


def test_a_host_behind_a_link_that_swallows_everything_is_lost(host) -> None:
    _, port = host
    with mutable(port) as (front, mute), watched(front) as lost_s:
        time.sleep(HEARTBEAT.lost_after_s)
        assert not lost_s
        mute.set()
        await_loss(lost_s, 1, time.monotonic())


def test_nobody_there_is_lost_as_well() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as never_accepts,
        watched(never_accepts.getsockname()[1]) as lost_s,
    ):
        took_s = await_loss(lost_s, 1, time.monotonic())
    assert took_s > HEARTBEAT.lost_after_s - HEARTBEAT.period_s


@pytest.mark.parametrize(("period_s", "misses"), [(0.1, 3), (float("inf"), 3), (2.0, 2)])
def test_a_heartbeat_that_cannot_be_kept_is_refused(period_s: float, misses: int) -> None:
    with pytest.raises(ConfigError, match="a heartbeat needs"):
        Heartbeat(period_s=period_s, misses=misses)


@contextmanager
def mutable(port: int) -> Iterator[tuple[int, threading.Event]]:
    """A port before another one that forwards until it is mute; it never closes a connection."""
    mute, over = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as front:
        thread = threading.Thread(target=_forward, args=(front, port, mute, over))
        thread.start()
        yield front.getsockname()[1], mute
        over.set()
        thread.join(5)


def _forward(front: socket.socket, port: int, mute: threading.Event, over: threading.Event) -> None:
    other: dict[socket.socket, socket.socket] = {}
    while not over.is_set():
        for ready in select.select([front, *other], [], [], 0.05)[0]:
            if mute.is_set():
                continue
            if ready is front:
                near, far = front.accept()[0], socket.create_connection(("127.0.0.1", port))
                other |= {near: far, far: near}
            elif data := ready.recv(65536):
                other[ready].sendall(data)
    for end in other:
        end.close()
