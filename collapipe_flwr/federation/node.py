"""A Flower node as a cluster: its run-config, its place among the others, its data and devices.

Where it learns from a stream, what arrived since the last round is tested first, then trained on.
How far a cluster has read is part of its `NodeState`, so rows of a round that the server did not
accept are fresh again. Where that is missing, all that has arrived counts as past, so that nothing
is called fresh twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context

from collapipe_flwr.cluster.fleet import Fleet, ThreadFleet
from collapipe_flwr.cluster.local_data import LocalData, Place, RoundExamples, local_data, own_data
from collapipe_flwr.cluster.profile import describe_cluster, profile_of
from collapipe_flwr.cluster.recovery import Recovery
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig, read_cluster
from collapipe_flwr.config.schema import AppConfig, EdgeConfig, parse
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.stream import Stream, StreamPlace, next_round
from collapipe_flwr.data.tokenizer import Vocabulary
from collapipe_flwr.federation.node_state import STATE_KEY, STREAM, NodeState, state_folder
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.federation.rounds import Progress
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import NextHop
from collapipe_flwr.transport.client import EdgeClient

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger("flwr.collapipe")
CLUSTER_KEY = "cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDevices:
    """Who works in one round, and how it goes on when some of them are lost."""

    fleet: Fleet
    recovery: Recovery

    def absent(self) -> tuple[str, ...]:
        """The devices that do not answer, of all that the cluster has."""
        ours = [device.device_id for device in self.recovery.profile.devices]
        return tuple(sorted(self.fleet.missing(ours)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a run; ``cluster`` is the file that describes it, None for a simulated one."""

    config: AppConfig
    place: Place
    cluster: ClusterConfig | None
    context: Context

    @staticmethod
    def of(context: Context) -> Node:
        """As run-config and ``--node-config`` say; raises ConfigError.

        Files that the node names as its own go before those of the run.
        """
        own = own_data(context.node_config)
        config = parse({**context.run_config, **own})
        index = context.node_config.get("partition-id")
        if index is None:
            raise ConfigError(
                "this node has no 'partition-id': start the SuperNode with "
                '--node-config "partition-id=0 num-partitions=2"'
            )
        place = Place(index=int(index), count=config.run.clusters, own_data=bool(own))
        return Node(config=config, place=place, cluster=_cluster_file(context), context=context)

    @property
    def is_spare(self) -> bool:
        """Whether the run has no place for it."""
        return self.place.index >= self.place.count

    def data(self, vocabulary_json: str) -> LocalData:
        """The cluster's examples, in the server's vocabulary."""
        return local_data(self.config, self.place, _vocabulary(vocabulary_json))

    def profile(self, examples: int | None = None) -> ClusterProfile:
        """The cluster as the planner sees it, for rounds of so many examples (None: its own)."""
        if examples is None:
            examples = local_data(self.config, self.place, None).examples_per_round
        if self.cluster is None:
            return describe_cluster(self.config.world, self.place, examples)
        return profile_of(self.cluster, examples)

    def state(self, server_round: int, progress: Progress, run_id: str) -> NodeState:
        """What it carries between rounds; its own state directory goes before the run's."""
        folder = self.context.node_config.get(STATE_KEY, self.config.train.state_dir)
        return NodeState(
            records=self.context.state,
            server_round=server_round,
            progress=progress,
            run_id=run_id,
            place=self.place,
            state_dir=state_folder(folder, run_id),
        )

    @contextmanager
    def devices(self, task: SplitTask, splitter: Splitter, examples: int) -> Iterator[RoundDevices]:
        """Its devices, joined to the edge session of ``task``, for a round of so many examples."""
        cluster = self.cluster
        with _edge_client(self.config.edge, cluster, task) as client:
            edge = client.session(task.session)
            local = ThreadFleet(edge.connect)
            fleet: Fleet = local if cluster is None else remote_fleet(cluster, task)
            recovery = Recovery(
                profile=self.profile(examples),
                model=lambda: profile_model(
                    splitter, task.shape, task.learning.optimizer.state_bytes
                ),
                edge=edge,
                snapshot_every=task.learning.snapshot_every,
            )
            yield RoundDevices(fleet=fleet, recovery=recovery)

    def examples(self, data: LocalData, state: NodeState) -> RoundExamples:
        """The cluster's examples of a round, from its part of the data or from its stream."""
        if self.config.data.stream:
            return _from_stream(self.config, data, state)
        chosen = data.chosen(state.progress.rounds)
        return RoundExamples(data=data, round_index=state.server_round, chosen=chosen)


def _cluster_file(context: Context) -> ClusterConfig | None:
    """The cluster named by ``--node-config "cluster='FILE' ..."``; None for a simulated one."""
    path = context.node_config.get(CLUSTER_KEY, "")
    if not isinstance(path, str):
        raise ConfigError(f"node-config cluster must be the path of a file, got {path!r}")
    return _read(Path(path)) if path else None


@lru_cache(maxsize=4)
def _read(path: Path) -> ClusterConfig:
    return read_cluster(path)


@lru_cache(maxsize=4)
def _vocabulary(text: str) -> Vocabulary:
    return Vocabulary.from_json(text)


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


def _from_stream(config: AppConfig, data: LocalData, state: NodeState) -> RoundExamples:
    stream = data.stream(config.data.stream)
    rng = np.random.default_rng([config.run.seed, state.place.index, state.server_round])
    found = next_round(
        stream,
        _place(stream, state),
        data.past,
        limit=data.examples_per_round,
        replay_share=config.data.stream_replay,
        rng=rng,
    )
    state.remember(STREAM, found.place)
    fresh = _rows(found.fresh)
    chosen = fresh + _rows(found.replayed)
    return RoundExamples(
        data=data,
        round_index=state.server_round,
        chosen=[chosen[row] for row in rng.permutation(len(chosen))],
        fresh=fresh,
    )


def _place(stream: Stream, state: NodeState) -> StreamPlace:
    """How far the accepted rounds of the cluster read."""
    place = state.recall(STREAM)
    if place is not None:
        return place
    if not state.progress.rounds:
        return StreamPlace()
    place = stream.everything()
    log.warning(
        "no place in data.stream of an earlier round here (a new SuperNode, or a resumed "
        "run): all %d examples that have arrived count as read%s",
        sum(file.read for file in place.files),
        state.advice,
    )
    return place


def _rows(table: Dataset) -> list[Example]:
    rows: list[Example] = table.to_list()
    return rows
