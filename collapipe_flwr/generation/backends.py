"""Chains that generate, on threads of this process or on a cluster's daemons.

The embedding runs here, blocks on a fleet, the rest of the model at the edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.hosted import HostedEdge, ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, RoundOrder
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.domain import ClusterPlan, Segment
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.generation.resilient import GenerationBackend
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.compute import CPU, hold
from collapipe_flwr.pipeline.generation_driver import GenerationDriver
from collapipe_flwr.pipeline.optimizer import OptimizerConfig

Weights = Mapping[str, Tensor]
IDLE_S = 24 * 3600.0  # a server may wait a day for its next text
_CLUSTER = "generation"
STATELESS = OptimizerConfig(name="sgd", learning_rate=1.0)  # nothing learns


def plan_evenly(
    num_blocks: int, device_ids: Sequence[str], cluster_id: str = _CLUSTER
) -> ClusterPlan:
    """Divide the blocks evenly, in order, over at most as many devices as there are blocks.

    Nothing is trained, so powers, times and energies are zero.
    """
    used = device_ids[:num_blocks]
    if not used:
        raise ConfigError("a cluster that generates needs at least one device")
    stops = [round(num_blocks * (index + 1) / len(used)) for index in range(len(used))]
    starts = [0, *stops[:-1]]
    return ClusterPlan(
        cluster_id=cluster_id,
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
    def open_chain(
        self, fleet: Fleet, device_ids: Sequence[str], *, cluster_id: str = _CLUSTER
    ) -> Iterator[GenerationDriver]:
        """Run a chain over these devices until the body ends.

        Raises LinkError when a device or the edge cannot be reached or fails.
        """
        order = RoundOrder(
            plan=plan_evenly(self.splitter.num_blocks, device_ids, cluster_id),
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


def make_thread_backend(served: ServedModel, devices: int) -> GenerationBackend:
    """Run devices and edge as threads of this process."""
    fleet = ThreadFleet(ThreadEdge(served.compute))
    return GenerationBackend(
        device_ids=tuple(f"device-{index}" for index in range(1, devices + 1)),
        chain=partial(served.open_chain, fleet),
        missing=fleet.missing,
    )


def make_daemon_backend(
    served: ServedModel, cluster: ClusterConfig, edge_address: str = ""
) -> GenerationBackend:
    """Use the daemons of a cluster file and its edge, or the edge at ``edge_address``."""
    address, name = edge_address or cluster.edge.address, cluster.certificate_name(cluster.edge)
    if not address:
        raise ConfigError(
            f"cluster {cluster.id} has no edge: give --edge HOST:PORT or an [edge] address"
        )

    edge = HostedEdge(
        address=address,
        certificate_name=name,
        tls=cluster.tls_files(cluster.control_unit.name),
        deadline_s=served.deadline_s,
    )
    fleet = RemoteFleet(cluster=cluster, edges={"": edge})
    return GenerationBackend(
        device_ids=tuple(
            cluster.device_id(each) for each in cluster.devices if each.name != cluster.edge.name
        ),
        chain=partial(served.open_chain, fleet, cluster_id=cluster.id),
        missing=fleet.missing,
    )
