"""A run that keeps what frozen blocks compute: the same losses, and planned, priced and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collapipe_flwr.cluster.local_data import DataPlace, LocalData
from collapipe_flwr.config.schema import parse
from tests.integration.conftest import TINY, RunApp, events_of

FROZEN = {"model.frozen-blocks": 2, "train.examples-per-round": 0, "num-server-rounds": 3}


def test_a_run_keeps_what_frozen_blocks_compute(
    run_app: RunApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    without = events_of(run_app({**FROZEN, "run-name": "without"}))
    kept = run_app({**FROZEN, "cache.max-gb": 1.0})
    found = events_of(kept)
    for ours, theirs in zip(found, without, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert not theirs["spared"]
    shares = [
        [spared["hits"] / spared["visits"] for spared in event["spared"].values()]
        for event in found
    ]
    assert shares == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    first, second, _ = (event["clusters"].values() for event in found)
    for each in (*first, *second):  # simulated: as the planner knew
        assert each["predicted_s"] == pytest.approx(each["latency_s"])
    spared = json.loads((kept / "summary.json").read_text())["spared"]
    assert spared["hits"] == pytest.approx(2 / 3 * spared["visits"])
    assert spared["seconds"] > 0 and spared["joules"] > 0


@pytest.mark.parametrize("per_round", [0, 7, 25, 59, 60])
def test_how_many_examples_come_back_is_known_before(per_round: int) -> None:
    config = parse({**TINY, "train.examples-per-round": per_round})
    data = LocalData(config, DataPlace(index=0, count=2), None)
    seen: set[str] = set()
    for done in range(12):
        drawn = [str(row) for row in data.draw_examples(done)]
        share = sum(row in seen for row in drawn) / len(drawn)
        assert data.seen_share(done) == pytest.approx(share)
        seen.update(drawn)
