"""Where a chain that generates can stand: on threads of this process, or on a cluster's daemons."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.cluster.serving import (
    Weights,
    edge_at,
    edge_here,
    even_plan,
    prompter,
    serving_order,
)
from collapipe_flwr.cluster.threads import ThreadFleet
from collapipe_flwr.core.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.prompter import Prompter
from collapipe_flwr.pipeline.session import NextHop, SessionKey
from collapipe_flwr.transport.client import EdgeClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model, and how many texts may be in the making at once."""

    splitter: Splitter
    weights: Weights
    slots: int
    deadline_s: float

    @contextmanager
    def over(self, fleet: Fleet, device_ids: Sequence[str]) -> Iterator[Prompter]:
        """A chain of these devices."""
        plan = even_plan(self.splitter.num_blocks, device_ids)
        order = serving_order(plan, self.weights, self.deadline_s)
        with prompter(self.splitter, order, fleet, slots=self.slots) as driver:
            yield driver


class ThreadSite:
    """Devices and edge as threads, joined as on a cluster; see `Site`."""

    def __init__(self, served: Served, devices: int) -> None:
        self.device_ids = tuple(f"device-{index}" for index in range(1, devices + 1))
        self._served = served
        self.fleet = ThreadFleet(
            lambda _: edge_here(served.splitter, served.weights, served.deadline_s)
        )

    @contextmanager
    def chain(self, device_ids: Sequence[str]) -> Iterator[Prompter]:
        """See `Site.chain`."""
        with self._served.over(self.fleet, device_ids) as driver:
            yield driver

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """See `Site.missing`."""
        return self.fleet.missing(device_ids)


@dataclass(frozen=True, kw_only=True)
class DaemonSite:
    """The daemons of a cluster file and its edge, or the one at ``edge_address``; see `Site`."""

    served: Served
    cluster: ClusterConfig
    edge_address: str = ""
    device_ids: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        ids = tuple(self.cluster.device_id(device) for device in self.cluster.devices)
        object.__setattr__(self, "device_ids", ids)
        if not self._address:
            raise ConfigError(
                f"cluster {self.cluster.id} has no edge: give --edge HOST:PORT or an [edge] address"
            )

    @contextmanager
    def chain(self, device_ids: Sequence[str]) -> Iterator[Prompter]:
        """See `Site.chain`; the edge gets its part first."""
        served, name = self.served, self._certificate_name
        with (
            EdgeClient(
                self._address,
                tls=self.cluster.tls_files(self.cluster.control_unit.name),
                certificate_name=name,
                deadline_s=served.deadline_s,
            ) as client,
            edge_at(client, served.splitter, served.weights, served.deadline_s) as hop,
            served.over(self._fleet(replace(hop, certificate_name=name)), device_ids) as driver,
        ):
            yield driver

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """See `Site.missing`."""
        nowhere = NextHop(address=self._address, key=SessionKey(session_id="", token=""))
        return self._fleet(nowhere).missing(device_ids)

    def _fleet(self, edge: NextHop) -> RemoteFleet:
        return RemoteFleet(cluster=self.cluster, edge=edge)

    @property
    def _address(self) -> str:
        return self.edge_address or self.cluster.edge.address

    @property
    def _certificate_name(self) -> str:
        return self.cluster.edge.name if self.cluster.tls else ""
