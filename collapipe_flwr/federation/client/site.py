"""A Flower node as a cluster: its devices, in this process or on boards, its edge, its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from flwr.app import Context, Message

from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.hosted import Edge, HostedEdge, ThreadEdge
from collapipe_flwr.cluster.profile import describe_cluster, profile_of
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, read_cluster
from collapipe_flwr.config.schema import EdgeConfig, TrainConfig, WorldConfig
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.hub import expand_home
from collapipe_flwr.core.links import TlsFiles, host_towards
from collapipe_flwr.federation.client import (
    CLUSTER_KEY,
    COMPUTE_KEY,
    STATE_KEY,
    named_path,
    partition_of,
)
from collapipe_flwr.federation.client.node_state import NodeState
from collapipe_flwr.federation.records import SplitTask, read_assignment, run_id_of
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.pipeline.compute import resolve

_MOST_HERE = 4  # sessions: one chain at a time, besides those that end
SPARE_S = 5.0  # that an edge is waited for where there is another
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
        """Set up the site of a node; its ``--node-config`` takes precedence. Raises ConfigError."""
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
        """Describe the cluster as the planner sees it."""
        return profile_of(self.cluster, examples) if self.cluster else self.simulated(examples)

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
        profile = self.profile(_ANY)
        if learning.labels_at_home:
            profile = replace(profile, edge=None, other_edges=())
        recovery = Recovery(
            profile=profile,
            model=lambda: replace(
                profile_model(splitter, task.shape, learning.optimizer.state_bytes),
                trusted_blocks=learning.trusted_blocks,
            ),
        )
        if self.cluster is None:
            yield ThreadFleet(self._edge_for_threads(task)), recovery
            return
        with self._edges(self.cluster, task) as edges:
            fleet = RemoteFleet(
                cluster=self.cluster,
                edges=edges,
                deadline_s=learning.deadline_s,
                heartbeat=learning.heartbeat,
            )
            yield fleet, recovery

    def _edge_for_threads(self, task: SplitTask) -> Edge:
        """Choose the run's edge, or else one in this process."""
        address = task.edge_address or task.simulated_edge
        if not address or task.learning.labels_at_home:
            return ThreadEdge(self.place)
        return _hosted(task, address, self.edge.certificate_name, self.edge.tls())

    @contextmanager
    def _edges(self, cluster: ClusterConfig, task: SplitTask) -> Iterator[dict[str, HostedEdge]]:
        """Yield the cluster file's edges by their ids, else the run's, else the control unit."""
        unit, several = cluster.control_unit, bool(cluster.other_edges)
        tls = cluster.tls_files(unit.name)
        with ExitStack() as stack:

            def at_home() -> HostedEdge:
                service = HostService(compute=self.place, most_sessions=_MOST_HERE)
                address = stack.enter_context(edge_here(cluster, service))
                found = _hosted(task, address, cluster.certificate_name(unit), tls)
                return replace(found, service=service)

            def hosted(edge: MemberConfig) -> HostedEdge:
                address = edge.address or ("" if several else task.edge_address)
                if edge.name == unit.name or not address:
                    return at_home()
                found = _hosted(task, address, cluster.certificate_name(edge), tls)
                most_s = min(SPARE_S, found.patience_s) if several else found.patience_s
                return replace(found, name=edge.name if several else found.name, patience_s=most_s)

            if task.learning.labels_at_home:
                yield {"": at_home()}
            else:
                yield {edge.name if several else "": hosted(edge) for edge in cluster.edges}


def _hosted(task: SplitTask, address: str, name: str, tls: TlsFiles | None) -> HostedEdge:
    deadline_s = task.learning.deadline_s
    return HostedEdge(
        address=address,
        certificate_name=name,
        tls=tls,
        deadline_s=deadline_s,
        patience_s=deadline_s,
        heartbeat=task.learning.heartbeat,
    )


@contextmanager
def edge_here(cluster: ClusterConfig, service: HostService) -> Iterator[str]:
    """Serve the edge in this process, and give its address.

    It listens where the cluster file says, else on a free port of the address by which this machine
    reaches the first device that it can reach itself.
    """
    unit = cluster.control_unit
    tls, rosters = cluster.tls_files(unit.name), None
    listen = next((edge.address for edge in cluster.edges if edge.name == unit.name), "")
    nearest = min(cluster.devices, key=lambda device: device.dials)
    listen = listen or f"{host_towards(nearest.address)}:0"
    if tls is not None and tls.ca is not None:
        rosters = Rosters(unit.name, [cluster], tls.ca)
    with HostServer(listen, service, tls=tls, rosters=rosters) as server:
        yield server.address


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
