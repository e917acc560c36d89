"""Which devices a node trains on: threads of its own, or the daemons of a cluster file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flwr.app import Context

from client_app.data import Place
from client_app.description import describe_cluster
from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.profile import profile_of
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.cluster.threads import ThreadFleet
from collapipe_flwr.core.cluster_file import ClusterConfig, read_cluster
from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.session import NextHop
from collapipe_flwr.transport.client import EdgeClient

CLUSTER_KEY = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Which cluster a node is, and the file that describes it; None for a simulated one."""

    config: AppConfig
    place: Place
    cluster: ClusterConfig | None

    def profile(self, examples: int) -> ClusterProfile:
        """The cluster as the planner sees it, for rounds of so many examples."""
        if self.cluster is None:
            return describe_cluster(self.config.world, self.place, examples)
        return profile_of(self.cluster, examples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Who works in one round, and how it goes on when some of them are lost."""

    fleet: Fleet
    recovery: Recovery

    def absent(self) -> tuple[str, ...]:
        """The devices that do not answer, of all that the cluster has."""
        ours = [device.device_id for device in self.recovery.profile.devices]
        return tuple(sorted(self.fleet.missing(ours)))


def cluster_file(context: Context) -> ClusterConfig | None:
    """The cluster named by ``--node-config "cluster='FILE' ..."``; None for a simulated one."""
    path = context.node_config.get(CLUSTER_KEY, "")
    if not isinstance(path, str):
        raise ConfigError(f"node-config cluster must be the path of a file, got {path!r}")
    return _read(Path(path)) if path else None


@contextmanager
def open_crew(site: Site, task: SplitTask, splitter: Splitter, examples: int) -> Iterator[Crew]:
    """The devices and the edge of one round, whose session the server opened.

    ``examples`` is what a round of this cluster trains on.
    """
    with _edge_client(site, task) as client:
        edge = client.session(task.session)
        fleet: Fleet = ThreadFleet(edge.connect)
        if site.cluster is not None:
            fleet = remote_fleet(site.cluster, task)
        recovery = Recovery(
            profile=site.profile(examples),
            model=lambda: splitter.profile(task.shape),
            edge=edge,
            snapshot_every=task.learning.snapshot_every,
        )
        yield Crew(fleet=fleet, recovery=recovery)


def _edge_client(site: Site, task: SplitTask) -> EdgeClient:
    """How the control unit itself reaches the edge; one that restarts is waited for."""
    edge, cluster, deadline_s = site.config.edge, site.cluster, task.learning.deadline_s
    heartbeat = task.learning.heartbeat
    if cluster is None:
        return EdgeClient(
            task.edge_address,
            tls=edge.tls(),
            certificate_name=edge.certificate_name,
            deadline_s=deadline_s,
            patience_s=deadline_s,
            heartbeat=heartbeat,
        )
    return EdgeClient(
        cluster.edge.address or task.edge_address,
        tls=cluster.tls_files(cluster.control_unit.name),
        certificate_name=cluster.edge.name if cluster.tls else "",
        deadline_s=deadline_s,
        patience_s=deadline_s,
        heartbeat=heartbeat,
    )


def remote_fleet(cluster: ClusterConfig, task: SplitTask) -> RemoteFleet:
    """The daemons of a cluster file, joined to the edge session of ``task``."""
    return RemoteFleet(
        cluster=cluster,
        edge=NextHop(
            address=cluster.edge.address or task.edge_address,
            key=task.session,
            certificate_name=cluster.edge.name if cluster.tls else "",
        ),
        deadline_s=task.learning.deadline_s,
        heartbeat=task.learning.heartbeat,
    )


@lru_cache(maxsize=4)
def _read(path: Path) -> ClusterConfig:
    return read_cluster(path)
