"""Runs an edge server as a process of its own; prints its address, then waits to be killed."""

import signal
import sys

import torch

from collapipe_flwr.host.server import HostServer
from tests.host.chain_to_edge import service

if __name__ == "__main__":
    torch.set_num_threads(1)
    with HostServer((sys.argv[1:] or ["127.0.0.1:0"])[0], service()) as server:
        print(server.address, flush=True)
        signal.pause()
