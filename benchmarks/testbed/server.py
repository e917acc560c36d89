"""The ServerApp's process: ``python -m benchmarks.testbed.server``.

It answers one JSON line per order on stdin, and ends when stdin does. A run is that of the
project's own ServerApp, whose nodes are the processes of the control units.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from benchmarks.testbed.trace import trace_server
from benchmarks.testbed.training import BATCH
from benchmarks.testbed.wire import Node, Values, grid_of
from collapipe_flwr.config.schema import AppConfig, parse
from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.core.processes import end_with_parent
from collapipe_flwr.federation.run.learner import make_learner
from collapipe_flwr.models.profile import profile_model
from server_app import app as server_app


class Server:
    """The nodes, by number from 1, and what is asked of them."""

    def __init__(self) -> None:
        self._nodes: dict[int, Node] = {}

    def connect(self, hosts: Sequence[str]) -> None:
        """Reach the control units."""
        self._nodes = {number: Node(host) for number, host in enumerate(hosts, start=1)}

    def check(self, clusters: Sequence[str], measured: Sequence[str], width: int) -> list[str]:
        """Have one control unit after the other, as they share the edge, measure its cluster.

        Returns what needs mending.
        """
        orders = zip(self._nodes.values(), clusters, measured, strict=True)
        return [fault for node, *order in orders for fault in node.ask("check", *order, width)]

    def run(self, clusters: Sequence[str], run_config: Values) -> dict[str, float]:
        """A whole run: every policy cuts the same batch into the micro-batches best for it."""
        for place, (number, node) in enumerate(self._nodes.items()):
            node.ask(
                "join", number, run_config, {"partition-id": place, "cluster": clusters[place]}
            )
        config = _on_equal_terms(parse(run_config))
        server_app.run(grid_of(self._nodes), config)
        return {"useful_flop": _useful_flop(config)}


def _on_equal_terms(config: AppConfig) -> AppConfig:
    """With the choices that are no keys of the run-config."""
    batch = min(BATCH, config.train.examples_per_round)
    settings = replace(config.scheduler.settings, best_batches=True, batch_size=batch)
    return replace(config, scheduler=replace(config.scheduler, settings=settings))


def _useful_flop(config: AppConfig) -> float:
    """Of a round: forward and backward passes of all blocks over all clusters' examples."""
    learner = make_learner(config)
    blocks = profile_model(learner.splitter, learner.shape).blocks
    examples = config.run.clusters * config.train.examples_per_round
    return examples * sum(block.forward_flop + block.backward_flop for block in blocks)


def answer(server: Server, order: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one order, or the sentence of its failure."""
    orders: dict[str, Callable[..., object]] = {
        "connect": server.connect,
        "check": server.check,
        "run": server.run,
    }
    details = {name: value for name, value in order.items() if name != "do"}
    try:
        return {"result": orders[order["do"]](**details)}
    except CollaPipeError as error:
        return {"fault": str(error)}


def main() -> None:
    """Answer until stdin ends; what the run prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    orders: SimpleQueue[str] = SimpleQueue()
    end_with_parent(orders.put)
    trace_server()
    server = Server()
    while True:
        answers.write(json.dumps(answer(server, json.loads(orders.get()))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
