"""Learning from a stream: what arrived since the last round is tested first, then trained on.

How far a cluster has read is kept in Flower's state of the node, per run. A node without that
state in a later round (a resumed run, a new SuperNode) counts all that has arrived as past, so
that nothing is called fresh twice.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datasets import Dataset
from flwr.app import ConfigRecord, Context

from client_app.data import LocalData, Place, RoundExamples
from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.data.batches import Example
from collapipe_flwr.data.stream import Stream, StreamPlace, next_round

_STATE = "collapipe.stream"


def examples_of_round(
    config: AppConfig, place: Place, data: LocalData, context: Context, server_round: int
) -> RoundExamples:
    """The cluster's examples of a round, from its part of the data or from its stream."""
    if not config.data.stream:
        chosen = data.chosen(server_round)
        return RoundExamples(data=data, round_index=server_round, chosen=chosen)
    stream = Stream(Path(config.data.stream).expanduser() / str(place.index), data.read_file)
    rng = np.random.default_rng([config.run.seed, place.index, server_round])
    found = next_round(
        stream,
        _before(context, stream, server_round),
        data.past,
        server_round=server_round,
        limit=data.examples_per_round,
        replay_share=config.data.stream_replay,
        rng=rng,
    )
    _remember(context, found.place)
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


def _before(context: Context, stream: Stream, server_round: int) -> StreamPlace:
    state = context.state.config_records.get(_STATE)
    if state is not None:
        return StreamPlace(
            server_round=_whole(state["server-round"]),
            files=tuple(str(name) for name in _names(state["files"])),
            start=_whole(state["start"]),
            stop=_whole(state["stop"]),
            rows=_whole(state["rows"]),
        )
    if server_round == 1:
        return StreamPlace()
    files = stream.files(())
    rows = len(stream.rows(files))
    return StreamPlace(server_round=server_round - 1, files=files, start=rows, stop=rows, rows=rows)


def _remember(context: Context, place: StreamPlace) -> None:
    context.state.config_records[_STATE] = ConfigRecord(
        {
            "server-round": place.server_round,
            "files": list(place.files),
            "start": place.start,
            "stop": place.stop,
            "rows": place.rows,
        }
    )


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


def _names(value: object) -> list[object]:
    assert isinstance(value, list)
    return value
