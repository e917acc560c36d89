"""A Flower Grid whose nodes are ClientApps in this process, for tests, notebooks and local runs.

It keeps Flower's contract (ids, error replies, copies instead of shared objects) without Ray or a
SuperLink. Nodes answer one after the other, or concurrently if they only forward messages.

    python -m collapipe_flwr.federation.local_grid RUN_CONFIG CLUSTER_FILE ...

runs the app in the current folder on real clusters: devices and edge are daemons, and messages
between the ServerApp and the ClientApps of the clusters stay in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from collapipe_flwr.config.parsing import declared_config, override, read_toml
from collapipe_flwr.core.errors import CollaPipeError, ConfigError, RunError
from collapipe_flwr.federation.client import CLUSTER_KEY, CONTROL_UNIT_KEY
from collapipe_flwr.federation.client.relay import load_app
from collapipe_flwr.federation.wrapped_grid import choose_ids

if TYPE_CHECKING:
    from flwr.supercore.run import Run

Answer = Callable[[Message, Context], Message]
CLIENT_APP_RAISED = 2  # flwr's error code of an exception in a ClientApp
SERVER_NODE = 1
Wire = Callable[[RecordDict], RecordDict]


class LocalGrid(Grid):
    """Nodes by id; each is a ClientApp or a callable with the same signature.

    ``node_configs`` is the ``--node-config`` of each node; ``wire`` transforms contents in transit
    (a deep copy by default). ``at_once`` calls the nodes in threads. ``sent`` keeps the messages.
    """

    def __init__(
        self,
        nodes: Mapping[int, ClientApp | Answer],
        *,
        node_configs: Mapping[int, Mapping[str, str | int | float | bool]] | None = None,
        run_config: Mapping[str, str | int | float | bool] | None = None,
        wire: Wire = deepcopy,
        at_once: bool = False,
    ) -> None:
        self._nodes: dict[int, ClientApp | Answer] = {}
        self._contexts: dict[int, Context] = {}
        self._node_configs = node_configs or {}
        self._run_config = dict(run_config or {})
        # Flower refuses to make a Message before the process has an identity.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SERVER_NODE
        self._wire, self._at_once = wire, at_once
        self._replies: dict[str, Message] = {}
        self._run: Run | None = None
        self.sent: list[Message] = []
        for node, app in nodes.items():
            self.add(node, app)

    def add(self, node: int, app: ClientApp | Answer) -> None:
        """Connect a node."""
        self._nodes[node] = app
        config = dict(self._node_configs.get(node, {}))
        self._contexts[node] = Context(1, node, config, RecordDict(), dict(self._run_config))

    def remove(self, node: int) -> None:
        """Disconnect a node."""
        del self._nodes[node], self._contexts[node]

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        """The run; raises RunError before :meth:`set_run`."""
        if self._run is None:
            raise RunError("this grid has no run: call set_run first")
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver the messages; every node replies immediately."""
        pushed = list(messages)
        first = len(self.sent) + 1
        ids = [f"message-{number}" for number in range(first, first + len(pushed))]
        for message_id, message in zip(ids, pushed, strict=True):
            message.metadata.__dict__["_message_id"] = message_id
        self.sent += pushed
        self._replies |= dict(zip(ids, self._answer_all(pushed), strict=True))
        return ids

    def _answer_all(self, messages: list[Message]) -> list[Message]:
        if not self._at_once:
            return [self._answer(message) for message in messages]
        with ThreadPoolExecutor(max(len(messages), 1)) as pool:
            return list(pool.map(self._answer, messages))

    def pull_messages(  # type: ignore[override]  # as from flwr 1.43 on
        self,
        reply_to_message_ids: Iterable[str] | None = None,
        *,
        message_ids: Iterable[str] | None = None,
    ) -> list[Message]:
        """Return the replies, each once."""
        ids = choose_ids(reply_to_message_ids, message_ids)
        wanted = list(self._replies) if ids is None else ids
        return [self._replies.pop(i) for i in wanted if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        if node not in self._nodes:
            return Message(Error(5, "Node Unavailable"), reply_to=message)
        delivered = Message(self._wire(message.content), metadata=message.metadata)  # type: ignore[call-overload]
        try:
            reply = self._nodes[node](delivered, self._contexts[node])
        except Exception as error:  # as Flower does
            reason = f"{type(error)}:<'{error}'>"
            return Message(Error(CLIENT_APP_RAISED, reason), reply_to=message)
        if reply.has_content():
            reply.content = self._wire(reply.content)
        return reply


def run_locally(project: Path, run_config: dict[str, Any], clusters: Sequence[Path]) -> None:
    """Run the app in ``project`` to its end; raises what its ServerApp raises."""
    sys.path.insert(0, str(project))
    server, client = (
        load_app(_read_component(project, name)) for name in ("serverapp", "clientapp")
    )
    configs: dict[int, dict[str, str | int | float | bool]] = {
        SERVER_NODE + 1 + index: {
            "partition-id": index,
            "num-partitions": len(clusters),
            CLUSTER_KEY: str(file),
            CONTROL_UNIT_KEY: "",
        }
        for index, file in enumerate(clusters)
    }
    grid = LocalGrid(
        dict.fromkeys(configs, client), node_configs=configs, run_config=run_config, at_once=True
    )
    server(grid, Context(1, SERVER_NODE, {}, RecordDict(), run_config))


def _read_component(project: Path, name: str) -> str:
    tables = read_toml(project / "pyproject.toml", "pyproject.toml")
    found = tables.get("tool", {}).get("flwr", {}).get("app", {}).get("components", {}).get(name)
    if not isinstance(found, str):
        raise ConfigError(f"{project}/pyproject.toml names no {name} in tool.flwr.app.components")
    return found


def main() -> None:
    """Run the command line's app; an error is the last line on stderr."""
    config, *clusters = sys.argv[1:]
    project = Path.cwd()
    try:
        values = override(declared_config(project), read_toml(Path(config), config))
        run_locally(project, values, [Path(file) for file in clusters])
    except CollaPipeError as error:  # an app of the user's need not have logged it
        raise SystemExit(f"ERROR: {error}") from error


if __name__ == "__main__":
    main()
