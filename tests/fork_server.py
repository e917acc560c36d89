"""A process that has imported what a daemon needs; an order forks it and runs a module there.

    python -m tests.fork_server NAME

listens on the abstract Unix socket NAME in the background when the command returns, and ends with
the last process that stays connected. It has no threads, so its forks may have their own. Orders
are given by `forked`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from collapipe_flwr.host.daemon import hide_unused_libraries

STAY, RUN = b"s", b"r"  # the first byte of a connection
STREAMS = 3  # come with RUN, to become stdin, stdout and stderr
REPORT = struct.Struct("!i")  # the id of the process, then its exit code
_IMPORTED = (
    "benchmarks.data_plane.worker",
    "collapipe_flwr.cli",
    "collapipe_flwr.host.service",
    "collapipe_flwr.host.servicer",
    "collapipe_flwr.host.stores",
    "collapipe_flwr.models.splitter",
    "collapipe_flwr.pipeline.benchmark",
    "collapipe_flwr.transport.client",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.marian.modeling_marian",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Run a module as ``python -m`` does."""

    module: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]


def main(name: str) -> None:
    """Returns at once in the process that calls it, and in a fork when its module has ended."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError:
            return  # another one was faster
        listener.listen()
        if os.fork():
            return
        os.setsid()
        hide_unused_libraries()
        for module in _IMPORTED:
            importlib.import_module(module)
        gc.freeze()
        assert len(os.listdir("/proc/self/task")) == 1
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
        order = _await_order(listener)
    if order is not None:
        sys.argv = [order.module, *order.arguments]
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)


def _await_order(listener: socket.socket) -> Order | None:
    """Returns in a fork with an order, or when nobody stays connected."""
    staying: set[socket.socket] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            events = [key.fileobj for key, _ in selector.select()]
            for gone in staying.intersection(events):
                selector.unregister(gone)
                gone.close()
                staying.remove(gone)
            if listener in events:
                peer, _ = listener.accept()
                kind, streams, _, _ = socket.recv_fds(peer, 1, STREAMS)
                if kind == STAY:
                    peer.sendall(STAY)
                    selector.register(peer, selectors.EVENT_READ)
                    staying.add(peer)
                elif kind == RUN and os.fork() == 0:
                    for each in staying:
                        each.close()
                    return _obeyed(peer, streams)
                else:
                    peer.close()
                    for stream in streams:
                        os.close(stream)
            elif not staying:
                return None


def _obeyed(peer: socket.socket, streams: list[int]) -> Order:
    """Returns in a process with these streams, beside one that tells ``peer`` how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with peer.makefile("rb") as file:
        order = Order(**json.load(file))
    pid = os.fork()
    if pid:
        _watch(pid, peer, streams)
    peer.close()
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    return order


def _watch(pid: int, peer: socket.socket, streams: list[int]) -> NoReturn:
    """The process does not outlive ``peer``."""
    for stream in (*range(STREAMS), *streams):
        os.close(stream)
    ending, poll = os.pidfd_open(pid), select.poll()
    poll.register(ending, select.POLLIN)
    poll.register(peer, 0)  # nothing but that it hangs up
    peer.sendall(REPORT.pack(pid))
    if ending not in dict(poll.poll()):
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        peer.sendall(REPORT.pack(os.waitstatus_to_exitcode(status)))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
