"""A Flower node as a cluster: its devices, in this process or on boards, its edge, its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from flwr.app import Context, Message

from collapipe_flwr.cluster.edges import open_fleet
from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.hosted import Edge, HostedEdge, ThreadEdge
from collapipe_flwr.cluster.profile import describe_cluster, profile_cluster
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.config.cluster_file import LORA_RANK, ClusterConfig, read_cluster
from collapipe_flwr.config.schema import EdgeConfig, TrainConfig, WorldConfig
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.federation.client import (
    CLUSTER_KEY,
    COMPUTE_KEY,
    RANK_KEY,
    STATE_KEY,
    named_path,
    partition_of,
)
from collapipe_flwr.federation.client.node_state import NodeState
from collapipe_flwr.federation.records import SplitTask, read_assignment, run_id_of
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.simulation.world import with_demands

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
    lora_rank: int = 0  # of its node-config, if that has one

    @staticmethod
    def of(context: Context, world: WorldConfig, edge: EdgeConfig, train: TrainConfig) -> Site:
        """Set up the site of a node; its ``--node-config`` takes precedence. Raises ConfigError."""
        number = partition_of(context.node_config)
        index = context.node_id if number is None else number
        return Site(
            index=index,
            edge=edge,
            cluster=cluster_file(context.node_config),
            simulated=partial(describe_cluster, world, index),
            train=replace(train, compute=str(context.node_config.get(COMPUTE_KEY, train.compute))),
            lora_rank=_own_rank(context.node_config),
        )

    def profile(self, examples: int) -> ClusterProfile:
        """Describe the cluster as the planner sees it."""
        found = (
            profile_cluster(self.cluster, examples) if self.cluster else self.simulated(examples)
        )
        return replace(found, lora_rank=self.rank or found.lora_rank)

    @property
    def rank(self) -> int:
        """The rank of its adapters, 0 where neither its node-config nor its file has one."""
        return self.lora_rank or (self.cluster and self.cluster.lora_rank) or 0

    def state(self, message: Message, context: Context) -> NodeState:
        """Return the state from the last accepted round, for the round that ``message`` asks for.

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
            state_dir=expand_home(folder) if folder else None,
        )

    @property
    def place(self) -> torch.device:
        """The device of parts in this process; raises ConfigError if it does not exist."""
        return resolve(self.train.compute)

    @contextmanager
    def devices(self, task: SplitTask, splitter: AnySplitter) -> Iterator[tuple[Fleet, Recovery]]:
        """Yield the devices with their edge, and how a round recovers when some are lost."""
        learning = task.learning
        recovery = Recovery(
            profile=with_demands(
                self.profile(_ANY),
                labels_at_home=learning.labels_at_home,
                trusted_blocks=learning.trusted_blocks,
                updates=learning.updates,
            ),
            model=lambda: profile_model(splitter, task.shape, learning.count_kept_bytes),
        )
        if self.cluster is None:
            yield ThreadFleet(self._edge_for_threads(task)), recovery
            return
        with open_fleet(
            self.cluster,
            edge_address=task.edge_address,
            at_home=learning.labels_at_home,
            compute=self.place,
            deadline_s=learning.deadline_s,
            heartbeat=learning.heartbeat,
        ) as fleet:
            yield fleet, recovery

    def _edge_for_threads(self, task: SplitTask) -> Edge:
        """Choose the run's edge, or else one in this process."""
        address = task.edge_address or task.simulated_edge
        if not address or task.learning.labels_at_home:
            return ThreadEdge(self.place)
        deadline_s = task.learning.deadline_s
        return HostedEdge(
            address=address,
            certificate_name=self.edge.certificate_name,
            tls=self.edge.tls(),
            deadline_s=deadline_s,
            patience_s=deadline_s,
            heartbeat=task.learning.heartbeat,
        )


def _own_rank(node_config: Mapping[str, object]) -> int:
    """Read the rank of the node's adapters, 0 without one; raises ConfigError."""
    found = node_config.get(RANK_KEY, 0)
    if RANK_KEY in node_config and (type(found) is not int or not LORA_RANK.holds(found)):
        raise ConfigError(f"node-config {RANK_KEY} {LORA_RANK.says}, got {found!r}")
    return int(str(found))


def cluster_file(node_config: Mapping[str, object]) -> ClusterConfig | None:
    """Read the cluster that ``--node-config "cluster='FILE' ..."`` names; None if simulated."""
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
