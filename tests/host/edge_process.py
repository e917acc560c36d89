"""Runs an edge server as a process of its own; prints its address, then waits to be killed."""

import signal
import sys
from pathlib import Path

import torch

from collapipe_flwr.host.server import EdgeServer
from collapipe_flwr.host.stores import SnapshotStore
from tests.host.chain_to_edge import service

if __name__ == "__main__":
    torch.set_num_threads(1)
    listen, *state_dir = sys.argv[1:] or ["127.0.0.1:0"]
    store = SnapshotStore(Path(state_dir[0])) if state_dir else None
    with EdgeServer(listen, service(snapshots=store)) as server:
        print(server.address, flush=True)
        signal.pause()
