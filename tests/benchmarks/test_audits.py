"""The table of audits: shares are audited exactly, and every one has a row."""

from __future__ import annotations

import logging

import pytest

from benchmarks.audits import Evenly, measured, table
from collapipe_flwr.cluster import recovery

TINY = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
TINY |= {"intermediate_size": 24, "max_position_embeddings": 32}


def test_draws_choose_exactly_the_share() -> None:
    for share, count in ((0.0, 0), (1e-9, 0), (0.01, 1), (0.05, 5), (0.1, 10), (1.0, 100)):
        draws = Evenly(share)
        assert sum(draws.random() < share for _ in range(100)) == count


def test_every_share_has_a_row(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovery, "_draw", recovery._draw)
    with caplog.at_level(logging.INFO, logger="collapipe_flwr.cluster.audit"):
        told = measured(TINY, 50, 4, (0.0, 0.5))
    assert sum(message.startswith("audited") for message in caplog.messages) == 2
    assert all(taken["cpu_s"] > 0 for taken in told["shares"].values())
    assert len(table(told).splitlines()) == 2 + 2
