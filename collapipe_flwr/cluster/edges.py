"""Fleets with their edges: those of the cluster file, else the run's, else the control unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig
from collapipe_flwr.core.links import Heartbeat, find_own_address
from collapipe_flwr.core.processes import run_beside
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService

SPARE_S = 5.0  # the patience with an edge that another one can replace
_MOST_HERE = 4  # sessions: one chain at a time, and earlier ones that are ending


@contextmanager
def open_fleet(
    cluster: ClusterConfig,
    *,
    edge_address: str,
    at_home: bool,
    compute: torch.device,
    deadline_s: float,
    heartbeat: Heartbeat | None = None,
) -> Iterator[RemoteFleet]:
    """Yield the fleet, with its edges by their ids in plans, in order of preference.

    ``edge_address`` is the run's edge, for a file that names none. The control unit, which is the
    only edge if it is to be ``at_home``, serves it in this process and computes on ``compute``.
    """
    unit = cluster.control_unit
    members = (unit,) if at_home else cluster.used_edges
    several = len(members) > 1
    with ExitStack() as stack:

        def reach(member: MemberConfig) -> HostedEdge:
            address, service = member.address or ("" if several else edge_address), None
            if member.name == unit.name or not address:
                member, service = unit, HostService(compute=compute, most_sessions=_MOST_HERE)
                address = stack.enter_context(serve_edge(cluster, service))
            named = {"name": member.name} if several else {}
            return HostedEdge(
                address=address,
                certificate_name=cluster.certificate_name(member),
                tls=cluster.tls_files(unit.name),
                deadline_s=deadline_s,
                patience_s=min(SPARE_S, deadline_s) if several and not service else deadline_s,
                heartbeat=heartbeat,
                service=service,
                **named,
            )

        yield RemoteFleet(
            cluster=cluster,
            edges={member.name if several else "": reach(member) for member in members},
            deadline_s=deadline_s,
            heartbeat=heartbeat,
        )


@contextmanager
def serve_edge(cluster: ClusterConfig, service: HostService) -> Iterator[str]:
    """Serve the edge in this process, and yield its address.

    It listens at the address in the cluster file, else on a free port of the interface towards the
    first device that does not dial.
    """
    unit = cluster.control_unit
    tls, rosters = cluster.tls_files(unit.name), None
    listen = next((edge.address for edge in cluster.edges if edge.name == unit.name), "")
    nearest = min(cluster.devices, key=lambda device: device.dials)
    listen = listen or f"{find_own_address(nearest.address)}:0"
    if tls is not None and tls.ca is not None:
        rosters = Rosters(unit.name, [cluster], tls.ca)
    with ExitStack() as stack:
        server = stack.enter_context(HostServer(listen, service, tls=tls, rosters=rosters))
        if rosters is not None and cluster.version:  # a device may be removed during a round
            stack.enter_context(run_beside(rosters.follow_files, "rosters"))
        yield server.address
