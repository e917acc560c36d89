"""A small run of the two apps as a process of its own; its run-config is the JSON argument.

A second argument is the round in which it kills itself, between its checkpoint and its events.
"""

import json
import os
import signal
import sys

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.recorder import RunRecorder
from server_app.app import run


def _die_in(last: int) -> None:
    evaluate = RunRecorder.evaluate

    def evaluate_or_die(self, server_round, arrays):
        if server_round == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(self, server_round, arrays)

    RunRecorder.evaluate = evaluate_or_die


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        _die_in(int(sys.argv[2]))
    places = {i + 1: {"partition-id": i, "num-partitions": 2} for i in range(2)}
    apps = dict.fromkeys(places, client_app)
    run(LocalGrid(apps, node_configs=places, run_config=values), parse(values))
