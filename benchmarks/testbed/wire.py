"""Flower messages between the server's process and those of the control units, over TCP.

A process of a control unit is a node: it has the ClientApp and its context. Its namespace shapes
what it says, so weights take as long as on the way to a SuperNode. No SuperLink lies between.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection
from typing import Any

from flwr.app import Context, Message

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.local_grid import LocalGrid

PORT = 29600
KEY = "COLLAPIPE_TESTBED_KEY"  # in the environment of the bench's processes
Values = Mapping[str, str | int | float | bool]


def secret() -> bytes:
    """What both ends must know."""
    return bytes.fromhex(os.environ[KEY])


class Node:
    """A control unit, as a node of a `LocalGrid`."""

    def __init__(self, host: str) -> None:
        self._open_connection: Connection = Client((host, PORT), authkey=secret())

    def ask(self, *order: object) -> Any:
        """One order; raises RunError with the words of the other side's failure."""
        self._open_connection.send(order)
        fault, answer = self._open_connection.recv()
        if fault:
            raise RunError(fault)
        return answer

    def __call__(self, message: Message, context: Context) -> Message:
        """The reply of the ClientApp there; its own context is used."""
        del context
        content = self.ask("message", message.metadata, message.content)
        return Message(content, reply_to=message)


def grid_of(nodes: Mapping[int, Node]) -> LocalGrid:
    """All nodes work at once; nothing is shared with them, so nothing is copied."""
    return LocalGrid(nodes, wire=lambda content: content, at_once=True)
