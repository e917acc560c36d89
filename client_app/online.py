"""Learning from a stream: what arrived since the last round is tested first, then trained on.

How far a cluster has read is kept in its state directory, which survives a restart of the
SuperNode and serves a resumed run. Without one it lies in Flower's state of the node; then both
count all that has arrived as past, so that nothing is called fresh twice. Rows of a round that the
server did not accept are fresh again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ConfigRecord

from client_app.data import LocalData, RoundExamples
from client_app.node_state import STATE_KEY, NodeState
from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.stream import Stream, StreamPlace, next_round

if TYPE_CHECKING:
    from datasets import Dataset

_log = logging.getLogger("flwr.collapipe")
_STATE, _PLACE, _SUFFIX = "collapipe.stream", "place", ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMemory:
    """How far the cluster has read."""

    state: NodeState

    def recall(self, stream: Stream) -> StreamPlace:
        """How far its accepted rounds read."""
        place = self._recalled()
        if place is not None:
            return place
        if not self.state.progress.rounds:
            return StreamPlace()
        place = stream.everything()
        _log.warning(
            "no place in data.stream of an earlier round here (a new SuperNode, or a resumed "
            "run): all %d examples that have arrived count as read%s",
            sum(file.read for file in place.files),
            "" if self.state.state_dir else f"; {STATE_KEY} in --node-config would keep it",
        )
        return place

    def remember(self, place: StreamPlace) -> None:
        """Keep how far this round reads."""
        if files := self.state.files(_SUFFIX):
            needed = self.state.progress.needed
            files.remember(self.state.server_round, needed, partial(_write, place))
        else:
            self.state.remember(_STATE, ConfigRecord({_PLACE: to_json(place)}))

    def _recalled(self) -> StreamPlace | None:
        if files := self.state.files(_SUFFIX):
            return files.recall(self.state.progress.last_round, _read)
        record = self.state.recall(_STATE)
        return None if record is None else _parsed(str(record[_PLACE]))


def examples_of_round(config: AppConfig, data: LocalData, state: NodeState) -> RoundExamples:
    """The cluster's examples of a round, from its part of the data or from its stream."""
    server_round, place = state.server_round, state.place
    if not config.data.stream:
        chosen = data.chosen(state.progress.rounds)
        return RoundExamples(data=data, round_index=server_round, chosen=chosen)
    stream = data.stream(config.data.stream)
    rng = np.random.default_rng([config.run.seed, place.index, server_round])
    memory = StreamMemory(state=state)
    found = next_round(
        stream,
        memory.recall(stream),
        data.past,
        limit=data.examples_per_round,
        replay_share=config.data.stream_replay,
        rng=rng,
    )
    memory.remember(found.place)
    fresh = _rows(found.fresh)
    chosen = fresh + _rows(found.replayed)
    return RoundExamples(
        data=data,
        round_index=server_round,
        chosen=[chosen[row] for row in rng.permutation(len(chosen))],
        fresh=fresh,
    )


def _rows(table: Dataset) -> list[Example]:
    rows: list[Example] = table.to_list()
    return rows


def _parsed(text: str) -> StreamPlace:
    return from_json(StreamPlace, text, "the place in data.stream")


def _read(path: Path) -> StreamPlace:
    return _parsed(path.read_text(encoding="utf-8"))


def _write(place: StreamPlace, path: Path) -> None:
    path.write_text(to_json(place), encoding="utf-8")
