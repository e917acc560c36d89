"""Runs an edge server as a process of its own; prints its address, then waits to be killed."""

import torch

from collapipe_flwr.edge.server import EdgeServer
from tests.edge.chain_to_edge import service

if __name__ == "__main__":
    torch.set_num_threads(1)
    with EdgeServer("127.0.0.1:0", service()) as server:
        print(server.address, flush=True)
        server.wait(120)
