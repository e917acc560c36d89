"""Chains that generate, on threads of this process or on a cluster's daemons.

The embedding runs here, blocks on a fleet, the rest of the model at the edge.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from collapipe_flwr.cluster.edges import open_fleet
from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import EDGE, LearningSettings, TrainingOrder
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig
from collapipe_flwr.core.domain import ClusterPlan, PlannedExecution, Segment
from collapipe_flwr.core.errors import (
    CollaPipeError,
    ConfigError,
    EdgeLost,
    LinkError,
    MemberFailed,
)
from collapipe_flwr.generation.resilient import GenerationBackend
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.compute import CPU, hold
from collapipe_flwr.pipeline.generation_driver import GenerationDriver
from collapipe_flwr.pipeline.optimizer import OptimizerConfig

_log = logging.getLogger(__name__)
Weights = Mapping[str, Tensor]
IDLE_S = 24 * 3600.0  # a server may wait a day for its next text
_CLUSTER = "generation"
STATELESS = OptimizerConfig(name="sgd", learning_rate=1.0)  # nothing learns


def plan_evenly(
    num_blocks: int,
    device_ids: Sequence[str],
    cluster_id: str = _CLUSTER,
    edge: str = "",
    *,
    kept: int = 0,
    trusted: Collection[str] = (),
) -> ClusterPlan:
    """Divide the blocks evenly, in order, over at most as many devices as there are blocks.

    The first ``kept`` are for ``trusted`` devices alone, which come first then. Nothing is trained,
    so powers, times and energies are zero.
    """
    near = [name for name in device_ids if not kept or name in trusted][:num_blocks]
    far = [name for name in device_ids if name not in near][: num_blocks - len(near)]
    if not near:
        raise ConfigError(
            f"no trusted device of {cluster_id} is there, and privacy.trusted-blocks is {kept}: "
            "bring it back, or write trusted = true for another one"
            if device_ids
            else "a cluster that generates needs at least one device"
        )
    count = round(num_blocks * len(near) / len(near + far))
    ahead = min(max(count, kept), num_blocks) if far else num_blocks
    spans = (*_divide(0, ahead, near), *_divide(ahead, num_blocks, far[: num_blocks - ahead]))
    return ClusterPlan(
        cluster_id=cluster_id,
        edge=edge,
        segments=spans,
        micro_batch_size=1,
        micro_batches=1,
        warmup_depth=(1,) * (len(spans) + 2),
        local_steps=1,
        bandwidth_hz=0.0,
        tx_power_w={},
        gradient_power_w={},
        latency_s=0.0,
        step_s=0.0,
        energy_j={},
        memory_bytes={},
        execution=PlannedExecution(schedule="gpipe"),
    )


def _divide(first: int, stop: int, device_ids: Sequence[str]) -> Iterator[Segment]:
    count, blocks = len(device_ids), stop - first
    for index, name in enumerate(device_ids):
        ends = (first + round(blocks * place / count) for place in (index, index + 1))
        yield Segment(device_id=name, first_block=next(ends), stop_block=next(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model for up to ``slots`` texts at once; ``compute`` is the device of this process."""

    splitter: Splitter
    weights: Weights
    slots: int
    deadline_s: float
    compute: torch.device = CPU

    @contextmanager
    def open_chain(self, fleet: Fleet, plan: ClusterPlan) -> Iterator[GenerationDriver]:
        """Run a chain until the body ends.

        Raises LinkError when a device or the edge cannot be reached or fails.
        """
        order = TrainingOrder(
            plan=plan,
            weights=self.weights,
            learning=LearningSettings(optimizer=STATELESS, deadline_s=self.deadline_s),
            idle_s=IDLE_S,
            compute=self.compute,
        )
        embedding = hold(self.splitter.build_embedding(self.weights), self.compute)
        with fleet.open_chain(self.splitter, order) as chain:
            driver = GenerationDriver(
                embedding,
                chain.link,
                order.configure_stage(0),
                cached=not self.splitter.decodes,
                slots=self.slots,
                input_name=self.splitter.input_name,
            )
            yield driver
            driver.finish()


def make_thread_backend(served: ServedModel, devices: int) -> GenerationBackend:
    """Run devices and edge as threads of this process."""
    fleet = ThreadFleet(ThreadEdge(served.compute))

    def chain(device_ids: Sequence[str]) -> AbstractContextManager[GenerationDriver]:
        return served.open_chain(fleet, plan_evenly(served.splitter.num_blocks, device_ids))

    return GenerationBackend(
        device_ids=tuple(f"device-{index}" for index in range(1, devices + 1)),
        chain=chain,
        missing=fleet.find_missing,
    )


@contextmanager
def open_daemon_backend(
    served: ServedModel, cluster: ClusterConfig, edge_address: str = ""
) -> Iterator[GenerationBackend]:
    """Use the daemons of a cluster file and its edges, or the edge at ``edge_address``.

    As in training, only trusted devices hold the blocks that the file keeps there, and a chain ends
    on the first edge that does its work.
    """
    if edge_address:
        if cluster.privacy.labels_at_home:
            raise ConfigError(
                f"--edge {edge_address}: the file of cluster {cluster.id} keeps the head at its "
                'control unit, by [privacy] labels = "home": leave --edge out'
            )
        name = cluster.edge.name if cluster.edge in cluster.edge_machines else EDGE
        edge = MemberConfig(name=name, address=edge_address)
        cluster = replace(cluster, edge=edge, other_edges=())
    trusted = frozenset(cluster.device_id(device) for device in cluster.devices if device.trusted)
    with open_fleet(
        cluster,
        edge_address="",
        at_home=False,
        compute=served.compute,
        deadline_s=served.deadline_s,
    ) as fleet:
        places = list(zip(fleet.edges, map(cluster.device_id, cluster.used_edges), strict=True))

        @contextmanager
        def chain(device_ids: Sequence[str]) -> Iterator[GenerationDriver]:
            with ExitStack() as stack:
                for left in reversed(range(len(places))):
                    edge, holds_none = places[0]
                    try:
                        plan = plan_evenly(
                            served.splitter.num_blocks,
                            [name for name in device_ids if name != holds_none],
                            cluster.id,
                            edge,
                            kept=cluster.privacy.trusted_blocks,
                            trusted=trusted,
                        )
                        driver = stack.enter_context(served.open_chain(fleet, plan))
                        break
                    except (ConfigError, EdgeLost, MemberFailed) as error:
                        if not left or not _is_of_edge(error):
                            raise
                        _log.warning("the edge %s cannot serve: %s", edge, error)
                        places.append(places.pop(0))
                try:
                    yield driver
                except LinkError as error:
                    if _is_of_edge(error):
                        places.append(places.pop(0))
                    raise

        own = "" if len(places) > 1 else places[0][1]
        yield GenerationBackend(
            device_ids=tuple(n for n in map(cluster.device_id, cluster.devices) if n != own),
            chain=chain,
            missing=fleet.find_missing,
        )


def _is_of_edge(error: CollaPipeError) -> bool:
    """Return whether another edge may do better: no device is to blame."""
    return not isinstance(error, MemberFailed) or error.witness == EDGE
