"""Learning from a stream: what arrived since the last round is tested first, then trained on.

How far a cluster has read is kept in its state directory, which a SuperNode that is started again
finds, and a run that is resumed. Without one it lies in Flower's state of the node; both then count
all that has arrived as past, so that nothing is called fresh twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from datasets import Dataset
from flwr.app import ConfigRecord

from client_app.data import LocalData, RoundExamples
from client_app.node_state import STATE_KEY, NodeState
from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.stream import Stream, StreamPlace, next_round

_log = logging.getLogger("flwr.collapipe")
_STATE, _PLACE, _SUFFIX = "collapipe.stream", "place", ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMemory:
    """How far the cluster has read."""

    state: NodeState

    def recall(self, stream: Stream) -> StreamPlace:
        """What its last round read, which may be this one, when it is repeated."""
        place = self._recalled()
        if place is not None:
            return place
        if self.state.server_round == 1:
            return StreamPlace()
        files = stream.files(())
        rows = len(stream.rows(files))
        _log.warning(
            "no place in data.stream of an earlier round here (a new SuperNode, or a resumed "
            "run): all %d rows that have arrived count as read%s",
            rows,
            "" if self.state.state_dir else f"; {STATE_KEY} in --node-config would keep it",
        )
        return StreamPlace(
            server_round=self.state.server_round - 1, files=files, start=rows, stop=rows, rows=rows
        )

    def remember(self, place: StreamPlace) -> None:
        """Keep what this round reads."""
        if files := self.state.files(_SUFFIX):
            files.remember(self.state.server_round, partial(_write, place))
        else:
            self.state.records.config_records[_STATE] = ConfigRecord({_PLACE: to_json(place)})

    def _recalled(self) -> StreamPlace | None:
        if files := self.state.files(_SUFFIX):
            return files.recall(self.state.server_round, _read)
        record = self.state.records.config_records.get(_STATE)
        return None if record is None else _parsed(str(record[_PLACE]))


def examples_of_round(config: AppConfig, data: LocalData, state: NodeState) -> RoundExamples:
    """The cluster's examples of a round, from its part of the data or from its stream."""
    server_round, place = state.server_round, state.place
    if not config.data.stream:
        chosen = data.chosen(server_round - 1)
        return RoundExamples(data=data, round_index=server_round, chosen=chosen)
    stream = Stream(Path(config.data.stream).expanduser() / str(place.index), data.read_file)
    rng = np.random.default_rng([config.run.seed, place.index, server_round])
    memory = StreamMemory(state=state)
    found = next_round(
        stream,
        memory.recall(stream),
        data.past,
        server_round=server_round,
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
