"""The bench of frozen blocks: what is kept is not computed again, and the page shows its file."""

from __future__ import annotations

import json

import pytest

from benchmarks.frozen_blocks import KEPT, MINILM, ON_DEVICES, SIDES, TRAINED, measure, table
from tests.docs.pages import ROOT

TINY = {**MINILM, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4}
TINY |= {"num_hidden_layers": 4}


@pytest.mark.slow
def test_later_epochs_find_all_kept_and_lose_as_much() -> None:
    found = measure(4, 2, 40, seed=1, sizes=TINY)
    hits = {side: [epoch["hits"] for epoch in found["sides"][side]] for side in SIDES}
    assert hits == {TRAINED: [0] * 4, ON_DEVICES: [0] * 4, KEPT: [0, 40, 40, 40]}
    assert found["losses_apart"] < 1e-5 and found["kept_bytes"] > 40 * 8 * 48 * 4
    assert all(epoch["cpu_s"] > 0 for epochs in found["sides"].values() for epoch in epochs)
    assert all(epoch["spared_s"] > 0 for epoch in found["sides"][KEPT][1:])
    assert len(table([found]).splitlines()) == 2 + len(SIDES)


def test_the_page_shows_the_file() -> None:
    files = sorted((ROOT / "docs/results/frozen-blocks").glob("*.json"))
    assert (
        table([json.loads(file.read_text()) for file in files])
        in (ROOT / "docs/lora.md").read_text()
    )
