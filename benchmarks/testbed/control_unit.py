"""A control unit in a process of its own: ``python -m benchmarks.testbed.control_unit HOST``.

It serves the server's process, and ends when its stdin does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from benchmarks.testbed.brake import pay_for_passes
from benchmarks.testbed.trace import trace_control_unit
from benchmarks.testbed.wire import PORT, Values, secret
from client_app.app import app
from collapipe_flwr.cluster.check import CheckSettings, check_cluster
from collapipe_flwr.config.cluster_file import read_cluster
from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.core.processes import end_with_parent
from collapipe_flwr.host.allocator import configure_malloc
from collapipe_flwr.pipeline.benchmark import BenchmarkRequest
from collapipe_flwr.reporting.output import write_json


class ControlUnit:
    """A ClientApp and the context of its present run."""

    def __init__(self) -> None:
        self._context: Context | None = None

    def join(self, node: int, run_config: Values, node_config: Values) -> None:
        """Begin a run."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, node
        self._context = Context(1, node, dict(node_config), RecordDict(), dict(run_config))

    def message(self, metadata: Any, content: RecordDict) -> RecordDict:
        """What the app replies."""
        assert self._context is not None
        message = Message(content, metadata=metadata)  # type: ignore[call-overload]
        return app(message, self._context).content

    def check(self, cluster_file: str, path: str, width: int) -> tuple[str, ...]:
        """As `collapipe cluster check` does from here; returns what needs mending."""
        block = BenchmarkRequest(width=width, tokens=16, examples=16)
        settings = CheckSettings(block=block, payload_bytes=2**18, deadline_s=60.0, most_links=1)
        found = check_cluster(read_cluster(Path(cluster_file)), settings, lambda _: None)
        write_json(Path(path), to_plain(found))
        return found.faults


def serve(peer: Connection, unit: ControlUnit) -> None:
    """Answer until the other side hangs up; a failure is an answer, too."""
    orders: dict[str, Callable[..., object]] = {
        "join": unit.join,
        "message": unit.message,
        "check": unit.check,
    }
    while True:
        try:
            name, *arguments = peer.recv()
        except EOFError:
            return
        try:
            peer.send(("", orders[name](*arguments)))
        except Exception as error:  # as Flower does with whatever a client raises
            peer.send((f"{type(error).__name__}: {error}", None))


def main() -> None:
    """Serve one peer after the other."""
    end_with_parent()
    pay_for_passes()
    trace_control_unit(ControlUnit)
    configure_malloc()
    unit = ControlUnit()
    with Listener((sys.argv[1], PORT), authkey=secret()) as listener:
        print("ready", flush=True)
        while True:
            with listener.accept() as peer:
                serve(peer, unit)


if __name__ == "__main__":
    main()
