"""A small run of the two apps as a process of its own; its run-config is the JSON argument."""

import json
import sys

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.federation.local_grid import LocalGrid
from server_app.app import run

if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    places = {i + 1: {"partition-id": i, "num-partitions": 2} for i in range(2)}
    apps = dict.fromkeys(places, client_app)
    run(LocalGrid(apps, node_configs=places, run_config=values), parse(values))
