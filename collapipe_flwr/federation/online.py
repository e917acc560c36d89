"""Learning from a stream: what arrived since the last round is tested first, then trained on.

How far a cluster has read is kept in its state directory, which survives a restart of the
SuperNode and serves a resumed run. Without one it lies in Flower's state of the node; then both
count all that has arrived as past, so that nothing is called fresh twice. Rows of a round that the
server did not accept are fresh again.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from collapipe_flwr.cluster.local_data import LocalData, RoundExamples
from collapipe_flwr.config.schema import AppConfig
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.stream import Stream, StreamPlace, next_round
from collapipe_flwr.federation.node_state import STREAM, NodeState

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger("flwr.collapipe")


def examples_of_round(config: AppConfig, data: LocalData, state: NodeState) -> RoundExamples:
    """The cluster's examples of a round, from its part of the data or from its stream."""
    if config.data.stream:
        return _from_stream(config, data, state)
    chosen = data.chosen(state.progress.rounds)
    return RoundExamples(data=data, round_index=state.server_round, chosen=chosen)


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
    _log.warning(
        "no place in data.stream of an earlier round here (a new SuperNode, or a resumed "
        "run): all %d examples that have arrived count as read%s",
        sum(file.read for file in place.files),
        state.advice,
    )
    return place


def _rows(table: Dataset) -> list[Example]:
    rows: list[Example] = table.to_list()
    return rows
