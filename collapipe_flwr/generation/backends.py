"""Chains that generate, on threads of this process or on a cluster's daemons.

The embedding runs here, blocks on a fleet, the rest of the model at the edge.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from collapipe_flwr.cluster.fleet import Fleet, LearningSettings, RoundOrder, ThreadFleet
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.errors import CollaPipeError, ConfigError, LinkError
from collapipe_flwr.generation.resilient import GenerationBackend
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.compute import CPU, hold
from collapipe_flwr.pipeline.config import NextHop, SessionKey, SessionRequest, StageConfig
from collapipe_flwr.pipeline.generation_driver import GenerationDriver
from collapipe_flwr.pipeline.link import Link, memory_pair
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.transport.client import EdgeClient

_log = logging.getLogger(__name__)
Weights = Mapping[str, Tensor]
IDLE_S = 24 * 3600.0  # a server may wait a day for its next text
_CLUSTER = "generation"
STATELESS = OptimizerConfig(name="sgd", learning_rate=1.0)  # nothing learns


def even_plan(num_blocks: int, device_ids: Sequence[str]) -> ClusterPlan:
    """Blocks divided evenly in order, over at most as many devices as blocks.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model for up to ``slots`` texts at once; ``compute`` is the device of this process."""

    splitter: Splitter
    weights: Weights
    slots: int
    deadline_s: float
    compute: torch.device = CPU

    @contextmanager
    def over(self, fleet: Fleet, device_ids: Sequence[str]) -> Iterator[GenerationDriver]:
        """Run a chain over these devices until the body ends.

        Raises LinkError when a device or the edge cannot be reached or fails.
        """
        order = RoundOrder(
            plan=even_plan(self.splitter.num_blocks, device_ids),
            weights=self.weights,
            learning=LearningSettings(
                optimizer=STATELESS, schedule="gpipe", deadline_s=self.deadline_s
            ),
            idle_s=IDLE_S,
            compute=self.compute,
        )
        embedding = hold(self.splitter.build_embedding(self.weights), self.compute)
        with fleet.chain(self.splitter, order) as chain:
            driver = GenerationDriver(
                embedding,
                chain.link,
                order.settings(0),
                cached=not self.splitter.decodes,
                slots=self.slots,
                input_name=self.splitter.input_name,
            )
            yield driver
            driver.finish()

    def edge_request(self) -> SessionRequest:
        """The request for a session of the edge's part."""
        return SessionRequest(
            key=SessionKey.random(_CLUSTER),
            spec_json=self.splitter.spec.to_json(),
            stage=StageConfig(name="edge", deadline_s=self.deadline_s, idle_s=IDLE_S),
            optimizer=STATELESS,
        )

    def edge_weights(self) -> dict[str, Tensor]:
        keys = (*self.splitter.edge_keys(), *self.splitter.shared_keys)
        return {key: self.weights[key] for key in keys}


@contextmanager
def edge_thread(served: ServedModel) -> Iterator[Link]:
    """The last device's link to an edge in a thread of this process."""
    service, request = EdgeService(compute=served.compute), served.edge_request()
    service.open(request)
    service.push_weights(request.key, served.edge_weights())
    ours, theirs = memory_pair("last device", "edge")
    session = service.claim(request.key)

    def serve() -> None:
        with suppress(CollaPipeError):  # both ends of the link report it
            service.serve(session, theirs)

    thread = threading.Thread(target=serve, name="edge", daemon=True)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(served.deadline_s)


@contextmanager
def edge_session(client: EdgeClient, served: ServedModel) -> Iterator[SessionKey]:
    """A session with the model's last part on the edge server that ``client`` talks to."""
    session = client.open_session(served.edge_request())
    try:
        session.push_weights(served.edge_weights())
        yield session.key
    finally:
        try:
            session.close()
        except LinkError as error:  # it ended when the chain broke
            _log.info("nothing to close: %s", error)


def thread_backend(served: ServedModel, devices: int) -> GenerationBackend:
    """Devices and edge as threads of this process."""
    fleet = ThreadFleet(lambda _: edge_thread(served))
    return GenerationBackend(
        device_ids=tuple(f"device-{index}" for index in range(1, devices + 1)),
        chain=partial(served.over, fleet),
        missing=fleet.missing,
    )


def daemon_backend(
    served: ServedModel, cluster: ClusterConfig, edge_address: str = ""
) -> GenerationBackend:
    """The daemons of a cluster file and its edge, or the edge at ``edge_address``."""
    address, name = edge_address or cluster.edge.address, cluster.certificate_name(cluster.edge)
    if not address:
        raise ConfigError(
            f"cluster {cluster.id} has no edge: give --edge HOST:PORT or an [edge] address"
        )

    no_session = SessionKey(session_id="", token="")
    edge = NextHop(address=address, key=no_session, certificate_name=name)
    fleet, tls = (
        RemoteFleet(cluster=cluster, edge=edge),
        cluster.tls_files(cluster.control_unit.name),
    )

    @contextmanager
    def chain(device_ids: Sequence[str]) -> Iterator[GenerationDriver]:
        with (
            EdgeClient.to(edge, tls, deadline_s=served.deadline_s) as client,
            edge_session(client, served) as key,
            served.over(replace(fleet, edge=replace(edge, key=key)), device_ids) as driver,
        ):
            yield driver

    return GenerationBackend(
        device_ids=tuple(map(cluster.device_id, cluster.devices)),
        chain=chain,
        missing=fleet.missing,
    )
