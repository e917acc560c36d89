"""A run of one cluster as a process of its own: ServerApp here, a ClientApp process per message.

    python -m tests.faults.run_process RUN_CONFIG_JSON CLUSTER_FILE

At the phase `FAULT_PHASE` of round `FAULT_ROUND` it kills itself, once, if `FAULT_ROLE` is
``server``. See `client_process` for the other roles.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.federation.checkpoint import Checkpoints
from collapipe_flwr.federation.hooks import StrategyHooks
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.run.recorder import RunRecorder
from server_app.app import run
from tests.forked import Forked

HOOKS = {
    "planning": (StrategyHooks, "_configure_round", lambda _, number, *__: number),
    "aggregating": (FedAvg, "aggregate_train", lambda _, number, *__: number),
    "checkpointing": (Checkpoints, "save", lambda _, checkpoint: checkpoint.server_round),
    "evaluating": (RunRecorder, "evaluate", lambda _, number, __: number),
}


class ClientProcess:
    """A node whose ClientApp runs in a new process for every message."""

    def __init__(self, run_config: dict[str, Any]) -> None:
        self._run_config = run_config

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply; raises LinkError where the process ends without one."""
        process = Forked("tests.faults.client_process", env=os.environ, talks=True)
        assert process.stdin is not None
        order = message, context.node_id, context.node_config, context.state, self._run_config
        with process.stdin, process.stdout:
            pickle.dump(order, process.stdin)
            process.stdin.flush()
            if _is_due("training", message):
                _die_with_the_first_step()
            answer = process.stdout.read()
        process.wait(30)
        if not answer:
            raise LinkError(f"the ClientApp process ended with {process.returncode}")
        reply, context.state = pickle.loads(answer)
        return reply


def _is_due(phase: str, message: Message) -> bool:
    if os.environ["FAULT_ROLE"] != "server" or os.environ["FAULT_PHASE"] != phase:
        return False
    return message.metadata.message_type == "train" and not os.path.exists(
        os.environ["FAULT_STRUCK"]
    )


def _die_with_the_first_step() -> None:
    """Once round `FAULT_ROUND` trains: each round has as many steps as the file says."""
    steps = os.environ["FAULT_STEPS"]
    seen = _count(steps)
    if not seen:
        return  # the first round
    end_s = time.monotonic() + 60.0
    while _count(steps) == seen:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    _die()


def _count(path: str) -> int:
    if not os.path.exists(path):
        return 0
    with open(path) as file:
        return sum(line.startswith("step") for line in file)


def _die() -> None:
    try:
        os.close(os.open(os.environ["FAULT_STRUCK"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    with open(os.environ["FAULT_STEPS"], "a") as file:
        file.write(f"struck {time.time()}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def _arm(phase: str) -> None:
    owner, name, round_of = HOOKS[phase]
    method = getattr(owner, name)

    def struck(*args: Any, **more: Any) -> Any:
        if round_of(*args) == int(os.environ["FAULT_ROUND"]):
            _die()
        return method(*args, **more)

    setattr(owner, name, struck)


if __name__ == "__main__":
    values, cluster = json.loads(sys.argv[1]), sys.argv[2]
    with open(os.environ["FAULT_LOG"], "ab") as log:
        os.dup2(log.fileno(), 2)
    if os.environ["FAULT_ROLE"] == "server" and os.environ["FAULT_PHASE"] in HOOKS:
        _arm(os.environ["FAULT_PHASE"])
    places = {1: {"partition-id": 0, "num-partitions": 1, "cluster": cluster}}
    grid = LocalGrid({1: ClientProcess(values)}, node_configs=places, run_config=values)
    run(grid, parse(values))
