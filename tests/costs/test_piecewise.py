"""A pass piece by piece takes the memory of one piece, and only where the whole takes more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collapipe_flwr.core.domain import BlockCost
from collapipe_flwr.costs.work import count_end_bytes, count_held_bytes

WHOLE = BlockCost(
    forward_flop=1.0,
    backward_flop=1.0,
    parameter_bytes=0,
    state_bytes=1000,
    stash_bytes=30.0,
    output_bytes=0.0,
    passing_bytes=90.0,
)


@pytest.mark.parametrize(
    ("size", "kept", "passing"),
    [
        (1, 30, 90),
        (4, 120, 360),  # as much as a piece and what is kept beside it
        (5, 10, 472),
        (50, 100, 472),
    ],
)
def test_memory_stops_growing_with_the_batch(size: int, kept: float, passing: float) -> None:
    cost = replace(WHOLE, piece_stash_bytes=2.0, piece_bytes=472.0)
    assert [float(part) for part in count_held_bytes(cost, size, 1)] == [kept, passing]
    assert float(count_end_bytes(cost, size, 1)) == 1000 + kept + passing


def test_without_pieces_it_grows() -> None:
    assert float(count_end_bytes(WHOLE, 50, 2)) == 1000 + 50 * (2 * 30 + 90)
