"""A Flower node as a cluster: its run-config, its place among the others, its data and devices.

Where it learns from a stream, what arrived since the last round is tested first, then trained on.
How far a cluster has read is part of its `NodeState`, so rows of a round that the server did not
accept are fresh again. Where that is missing, all that has arrived counts as past, so that nothing
is called fresh twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context

from collapipe_flwr.cluster.local_data import LocalData, Place, RoundExamples, local_data, own_data
from collapipe_flwr.cluster.profile import describe_cluster
from collapipe_flwr.config.schema import AppConfig, parse
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.stream import Stream, StreamPlace, next_round
from collapipe_flwr.data.tokenizer import Vocabulary
from collapipe_flwr.federation.node_state import STATE_KEY, STREAM, NodeState, state_folder
from collapipe_flwr.federation.rounds import Progress
from collapipe_flwr.federation.site import Site, cluster_file

if TYPE_CHECKING:
    from datasets import Dataset

log = logging.getLogger("flwr.collapipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a run: its configuration, its place among the others, its devices."""

    config: AppConfig
    place: Place
    site: Site
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
        site = Site(
            edge=config.edge,
            cluster=cluster_file(context.node_config),
            simulated=partial(describe_cluster, config.world, place.index),
        )
        return Node(config=config, place=place, site=site, context=context)

    @property
    def is_spare(self) -> bool:
        """Whether the run has no place for it."""
        return self.place.index >= self.place.count

    def data(self, vocabulary_json: str) -> LocalData:
        """The cluster's examples, in the server's vocabulary."""
        return local_data(self.config, self.place, _vocabulary(vocabulary_json))

    def profile(self) -> ClusterProfile:
        """The cluster as the planner sees it, for rounds of its own examples."""
        return self.site.profile(local_data(self.config, self.place, None).examples_per_round)

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

    def examples(self, data: LocalData, state: NodeState) -> RoundExamples:
        """The cluster's examples of a round, from its part of the data or from its stream."""
        if self.config.data.stream:
            return _from_stream(self.config, data, state)
        chosen = data.chosen(state.progress.rounds)
        return RoundExamples(data=data, round_index=state.server_round, chosen=chosen)


@lru_cache(maxsize=4)
def _vocabulary(text: str) -> Vocabulary:
    return Vocabulary.from_json(text)


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
