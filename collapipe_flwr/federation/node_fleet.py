"""The devices that a node trains on: threads of its own, or the daemons of a cluster file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.cluster.threads import ThreadFleet
from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import NextHop
from collapipe_flwr.transport.client import EdgeClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Who works in one round, and how it goes on when some of them are lost."""

    fleet: Fleet
    recovery: Recovery

    def absent(self) -> tuple[str, ...]:
        """The devices that do not answer, of all that the cluster has."""
        ours = [device.device_id for device in self.recovery.profile.devices]
        return tuple(sorted(self.fleet.missing(ours)))


@contextmanager
def open_crew(
    config: EdgeConfig,
    cluster: ClusterConfig | None,
    profile: ClusterProfile,
    task: SplitTask,
    splitter: Splitter,
) -> Iterator[Crew]:
    """The devices and the edge of one round, whose session the server opened.

    Without a ``cluster`` file the devices are threads, and ``config`` says how the edge is reached.
    """
    with _edge_client(config, cluster, task) as client:
        edge = client.session(task.session)
        local = ThreadFleet(edge.connect)
        fleet: Fleet = local if cluster is None else remote_fleet(cluster, task)
        recovery = Recovery(
            profile=profile,
            model=lambda: profile_model(splitter, task.shape),
            edge=edge,
            snapshot_every=task.learning.snapshot_every,
        )
        yield Crew(fleet=fleet, recovery=recovery)


def _edge_client(config: EdgeConfig, cluster: ClusterConfig | None, task: SplitTask) -> EdgeClient:
    """How the control unit itself reaches the edge; one that restarts is waited for."""
    address, tls, name = task.edge_address, config.tls(), config.certificate_name
    if cluster is not None:
        address, name = _edge_of(cluster, task)
        tls = cluster.tls_files(cluster.control_unit.name)
    return EdgeClient(
        address,
        tls=tls,
        certificate_name=name,
        deadline_s=task.learning.deadline_s,
        patience_s=task.learning.deadline_s,
        heartbeat=task.learning.heartbeat,
    )


def remote_fleet(cluster: ClusterConfig, task: SplitTask) -> RemoteFleet:
    """The daemons of a cluster file, joined to the edge session of ``task``."""
    address, name = _edge_of(cluster, task)
    return RemoteFleet(
        cluster=cluster,
        edge=NextHop(
            address=address,
            key=task.session,
            certificate_name=name,
        ),
        deadline_s=task.learning.deadline_s,
        heartbeat=task.learning.heartbeat,
    )


def _edge_of(cluster: ClusterConfig, task: SplitTask) -> tuple[str, str]:
    """Address and certificate name of the edge, as this cluster reaches it."""
    name = cluster.edge.name if cluster.tls else ""
    return cluster.edge.address or task.edge_address, name
