"""Chains that generate, on threads of this process or on a cluster's daemons.

The embedding runs here, blocks on a fleet, the rest of the model at the edge.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from collapipe_flwr.cluster.fleet import Fleet, LearningSettings, RoundOrder, ThreadFleet
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.errors import CollaPipeError, ConfigError, LinkError
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import NextHop, SessionKey, SessionRequest, StageConfig
from collapipe_flwr.pipeline.generation_driver import GenerationDriver
from collapipe_flwr.pipeline.link import Link, memory_pair
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.transport.client import EdgeClient

_log = logging.getLogger(__name__)
Weights = Mapping[str, Tensor]
IDLE_S = 24 * 3600.0  # a server may wait a day for its next text
_CLUSTER = "generation"
_STATELESS = OptimizerConfig(name="sgd", learning_rate=1.0)  # nothing learns


def even_plan(num_blocks: int, device_ids: Sequence[str]) -> ClusterPlan:
    """Blocks shared out evenly in order; no more devices than blocks are used.

    Nothing is trained, so powers, times and energies are zero.
    """
    used = device_ids[:num_blocks]
    if not used:
        raise ConfigError("a cluster that generates needs at least one device")
    stops = [round(num_blocks * (index + 1) / len(used)) for index in range(len(used))]
    starts = [0, *stops[:-1]]
    return ClusterPlan(
        cluster_id=_CLUSTER,
        segments=tuple(
            Segment(device_id=device, first_block=first, stop_block=stop)
            for device, first, stop in zip(used, starts, stops, strict=True)
        ),
        micro_batch_size=1,
        micro_batches=1,
        warmup_depth=(1,) * (len(used) + 2),
        local_steps=1,
        bandwidth_hz=0.0,
        tx_power_w={},
        gradient_power_w={},
        latency_s=0.0,
        step_s=0.0,
        energy_j={},
        memory_bytes={},
    )


@contextmanager
def open_driver(
    splitter: Splitter, order: RoundOrder, fleet: Fleet, *, slots: int
) -> Iterator[GenerationDriver]:
    """The control unit's end of a chain in generation; everything has ended afterwards.

    Raises LinkError when a device or the edge cannot be reached or breaks off.
    """
    embedding = splitter.build_embedding(order.weights)
    with fleet.chain(splitter, order) as chain:
        driver = GenerationDriver(
            embedding,
            chain.link,
            order.settings(0),
            cached=not splitter.decodes,
            slots=slots,
            input_name=splitter.input_name,
        )
        yield driver
        driver.finish()


def serving_order(plan: ClusterPlan, weights: Weights, deadline_s: float) -> RoundOrder:
    """``plan`` as an order that trains nothing."""
    return RoundOrder(
        plan=plan,
        weights=weights,
        learning=LearningSettings(optimizer=_STATELESS, schedule="gpipe", deadline_s=deadline_s),
        idle_s=IDLE_S,
    )


@contextmanager
def edge_thread(splitter: Splitter, weights: Weights, deadline_s: float) -> Iterator[Link]:
    """The last device's link to an edge in a thread of this process."""
    service, request = EdgeService(), _request(splitter, deadline_s)
    service.open(request)
    service.push_weights(request.key, _edge_weights(splitter, weights))
    ours, theirs = memory_pair("last device", "edge")
    session = service.claim(request.key)
    failures: list[CollaPipeError] = []

    def serve() -> None:
        try:
            service.serve(session, theirs)
        except CollaPipeError as error:  # it has reached both ends of the link
            failures.append(error)

    thread = threading.Thread(target=serve, name="edge", daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(deadline_s)


@contextmanager
def edge_session(
    client: EdgeClient, splitter: Splitter, weights: Weights, deadline_s: float
) -> Iterator[NextHop]:
    """A session with the model's last part on the edge server that ``client`` talks to."""
    session = client.open_session(_request(splitter, deadline_s))
    try:
        session.push_weights(_edge_weights(splitter, weights))
        yield NextHop(address=client.address, key=session.key)
    finally:
        try:
            session.close()
        except LinkError as error:  # it ended by itself when the chain broke
            _log.info("nothing to close: %s", error)


def _request(splitter: Splitter, deadline_s: float) -> SessionRequest:
    return SessionRequest(
        key=SessionKey.random(_CLUSTER),
        spec_json=splitter.spec.to_json(),
        stage=StageConfig(name="edge", deadline_s=deadline_s, idle_s=IDLE_S),
        optimizer=_STATELESS,
    )


def _edge_weights(splitter: Splitter, weights: Weights) -> dict[str, Tensor]:
    return {key: weights[key] for key in (*splitter.edge_keys(), *splitter.shared_keys)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model, and how many texts may be generated at once."""

    splitter: Splitter
    weights: Weights
    slots: int
    deadline_s: float

    @contextmanager
    def over(self, fleet: Fleet, device_ids: Sequence[str]) -> Iterator[GenerationDriver]:
        """Run a chain over these devices."""
        plan = even_plan(self.splitter.num_blocks, device_ids)
        order = serving_order(plan, self.weights, self.deadline_s)
        with open_driver(self.splitter, order, fleet, slots=self.slots) as driver:
            yield driver


class ThreadBackend:
    """Devices and edge as threads of this process; see `GenerationBackend`."""

    def __init__(self, served: ServedModel, devices: int) -> None:
        self.device_ids = tuple(f"device-{index}" for index in range(1, devices + 1))
        self._served = served
        self.fleet = ThreadFleet(
            lambda _: edge_thread(served.splitter, served.weights, served.deadline_s)
        )

    @contextmanager
    def chain(self, device_ids: Sequence[str]) -> Iterator[GenerationDriver]:
        """See `GenerationBackend.chain`."""
        with self._served.over(self.fleet, device_ids) as driver:
            yield driver

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """See `GenerationBackend.missing`."""
        return self.fleet.missing(device_ids)


@dataclass(frozen=True, kw_only=True)
class DaemonBackend:
    """The daemons of a cluster file and its edge, or the edge at ``edge_address``."""

    served: ServedModel
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
    def chain(self, device_ids: Sequence[str]) -> Iterator[GenerationDriver]:
        """See `GenerationBackend.chain`; the edge gets its part first."""
        served, name = self.served, self._certificate_name
        with (
            EdgeClient(
                self._address,
                tls=self.cluster.tls_files(self.cluster.control_unit.name),
                certificate_name=name,
                deadline_s=served.deadline_s,
            ) as client,
            edge_session(client, served.splitter, served.weights, served.deadline_s) as hop,
            served.over(self._fleet(replace(hop, certificate_name=name)), device_ids) as driver,
        ):
            yield driver

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """See `GenerationBackend.missing`."""
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
