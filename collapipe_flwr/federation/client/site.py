"""A Flower node as a cluster: its devices, in this process or on boards, its edge, its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from flwr.app import Context, Message

from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.profile import describe_cluster, profile_of
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig, read_cluster
from collapipe_flwr.config.schema import EdgeConfig, TrainConfig, WorldConfig
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.hub import expanded
from collapipe_flwr.federation.client import (
    CLUSTER_KEY,
    COMPUTE_KEY,
    STATE_KEY,
    named_path,
    partition_of,
)
from collapipe_flwr.federation.client.node_state import NodeState
from collapipe_flwr.federation.records import SplitTask, read_assignment, run_id_of
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.pipeline.config import NextHop
from collapipe_flwr.transport.client import EdgeClient, Session

_ANY = 1  # the number of examples does not matter within a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Node number ``index``: the devices of a ``cluster`` file, or ``simulated`` ones in threads.

    ``simulated`` describes them for rounds of so many examples. ``edge`` is how a node without a
    file reaches the edge. Of ``train``, ``threads`` are those of torch in this process, ``compute``
    is the device of its parts, and ``state_dir`` keeps state between rounds, unless the node names
    a folder of its own.
    """

    index: int
    edge: EdgeConfig
    cluster: ClusterConfig | None
    simulated: Callable[[int], ClusterProfile]
    train: TrainConfig

    @staticmethod
    def of(context: Context, world: WorldConfig, edge: EdgeConfig, train: TrainConfig) -> Site:
        """The site of a node, whose ``--node-config`` goes first; raises ConfigError."""
        number = partition_of(context.node_config)
        index = context.node_id if number is None else number
        return Site(
            index=index,
            edge=edge,
            cluster=cluster_file(context.node_config),
            simulated=partial(describe_cluster, world, index),
            train=replace(train, compute=str(context.node_config.get(COMPUTE_KEY, train.compute))),
        )

    def profile(self, examples: int) -> ClusterProfile:
        """The cluster as the planner sees it."""
        return profile_of(self.cluster, examples) if self.cluster else self.simulated(examples)

    def state(self, message: Message, context: Context) -> NodeState:
        """The state from the last accepted round, for the round that ``message`` asks for.

        An order without the id of its run, as of a library, belongs to Flower's run. Raises
        ConfigError if the node's state folder is no path.
        """
        asked = read_assignment(message.content)
        folder = named_path(context.node_config, STATE_KEY, "folder", self.train.state_dir)
        return NodeState(
            records=context.state,
            server_round=asked.server_round,
            attempt=asked.attempt,
            progress=asked.progress,
            run_id=run_id_of(message.content) or f"flower-{context.run_id}",
            index=self.index,
            state_dir=expanded(folder) if folder else None,
        )

    @property
    def place(self) -> torch.device:
        """The device of parts in this process; raises ConfigError if it does not exist."""
        return resolve(self.train.compute)

    @contextmanager
    def devices(
        self, task: SplitTask, splitter: AnySplitter
    ) -> Iterator[tuple[Fleet, Recovery, Session]]:
        """The devices, how a round recovers when some are lost, and the edge session of ``task``.

        The devices are joined to that session.
        """
        learning = task.learning
        with self._client(task) as client:
            edge = client.session(task.session)
            fleet: Fleet = ThreadFleet(edge.connect)
            if self.cluster is not None:
                address, name = self._edge(task)
                fleet = RemoteFleet(
                    cluster=self.cluster,
                    edge=NextHop(address=address, key=task.session, certificate_name=name),
                    deadline_s=learning.deadline_s,
                    heartbeat=learning.heartbeat,
                )
            recovery = Recovery(
                profile=self.profile(_ANY),
                model=lambda: profile_model(splitter, task.shape, learning.optimizer.state_bytes),
                edge=edge,
            )
            yield fleet, recovery, edge

    def _client(self, task: SplitTask) -> EdgeClient:
        """The control unit's own client of the edge, which waits for one that restarts."""
        address, name = self._edge(task)
        tls = self.edge.tls()
        if self.cluster is not None:
            tls = self.cluster.tls_files(self.cluster.control_unit.name)
        return EdgeClient(
            address,
            tls=tls,
            certificate_name=name,
            deadline_s=task.learning.deadline_s,
            patience_s=task.learning.deadline_s,
            heartbeat=task.learning.heartbeat,
        )

    def _edge(self, task: SplitTask) -> tuple[str, str]:
        """Address and certificate name by which this cluster reaches the edge."""
        if self.cluster is None:
            return task.edge_address, self.edge.certificate_name
        name = self.cluster.edge.name if self.cluster.tls else ""
        return self.cluster.edge.address or task.edge_address, name


def cluster_file(node_config: Mapping[str, object]) -> ClusterConfig | None:
    """The cluster named by ``--node-config "cluster='FILE' ..."``; None for a simulated one."""
    path = named_path(node_config, CLUSTER_KEY, "file")
    return _read(Path(path), _changed(Path(path))) if path else None


def _changed(path: Path) -> tuple[int, int] | None:
    """Modification time and size of the file; None without a file."""
    if not path.is_file():
        return None
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=4)
def _read(path: Path, changed: tuple[int, int] | None) -> ClusterConfig:
    del changed  # a resident process reads a changed file again
    return read_cluster(path)
