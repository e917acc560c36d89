"""Metrics: known values, and the ends of their scales."""

from __future__ import annotations

import pytest

from collapipe_flwr.data.metrics import bleu, chrf, match_rate

TEXTS = ["the cat sat on the mat", "we all live in a yellow submarine"]


def test_match_rate_counts_pairs() -> None:
    assert match_rate(["1", "2 ", "3", "4"], ["1", "2", "3", "5"]) == 0.75


def test_match_rate_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="zip"):
        match_rate(["1"], ["1", "2"])


@pytest.mark.parametrize("metric", [chrf, bleu])
def test_ends_of_the_scale(metric) -> None:  # type: ignore[no-untyped-def]
    assert metric(TEXTS, TEXTS) == pytest.approx(100)
    assert metric(["x", "z"], TEXTS) < 5 < metric(["the cat sat", TEXTS[1]], TEXTS) < 100
