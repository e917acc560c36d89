"""A small run of the two apps as a process of its own; its run-config is the JSON argument.

A second argument is the round in which it kills itself, between its checkpoint and its events, or
``write=N``: before the N-th step of a write, such as a flush or a rename. It prints their number
when it comes to its end.
"""

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.run.recorder import RunRecorder
from server_app.app import run
from tests.power_cuts import CALLS


def _die_in(last: int) -> None:
    evaluate = RunRecorder.evaluate

    def evaluate_or_die(self, server_round, arrays):
        if server_round == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(self, server_round, arrays)

    RunRecorder.evaluate = evaluate_or_die


def _die_at_write(last: int) -> "count[int]":
    steps = count(1)
    for name in CALLS:
        setattr(os, name, _counted(getattr(os, name), steps, last))
    return steps


def _counted(call, steps, last):
    def step(*args, **options):
        if next(steps) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    return step


def main(values: dict[str, object], moment: str) -> None:
    where, _, number = moment.rpartition("=")
    steps = _die_at_write(int(number)) if where else count(1)
    if number and not where:
        _die_in(int(number))
    places = {i + 1: {"partition-id": i, "num-partitions": 2} for i in range(2)}
    apps = dict.fromkeys(places, client_app)
    run(LocalGrid(apps, node_configs=places, run_config=values), parse(values))
    Path(str(values["output-dir"]), "writes").write_text(str(next(steps) - 1))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
