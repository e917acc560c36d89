"""The table of trusted blocks: every depth, every place of the edge, and what fits nowhere."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from benchmarks.trusted_depth import PLACES, measured, table
from collapipe_flwr.simulation.setting import ModelShape, Setting


def test_every_depth_and_place_has_a_cell() -> None:
    shape = ModelShape(blocks=1, width=64, tokens=16, decoder_blocks=1, vocabulary=300)
    settings = replace(
        Setting().settings, micro_batch_sizes=(4,), micro_batches=(2,), schedule="gpipe"
    )
    tiny = Setting(clusters=1, devices=2, examples=20, model=shape, settings=settings)
    with ThreadPoolExecutor(1) as pool:
        told = measured({"tiny": tiny}, pool)
    cells = told["seconds"]["tiny"]
    assert list(cells) == list(PLACES)
    assert all(list(each) == ["0", "1"] for each in cells.values())
    assert all(seconds > 0 for each in cells.values() for seconds in each.values())
    told["seconds"]["tiny"]["control unit"]["1"] = None
    rows = table(told).splitlines()
    assert len(rows) == 2 + 2 and rows[-1].count("no plan") == 1
