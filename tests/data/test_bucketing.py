"""Laws of bucketing and packing: every row once, little padding.

Buckets never have more than an equal cut, and the best largest group.
"""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.data.batches import (
    bucket_by_length,
    count_padded_tokens,
    cut_batches,
    pack_rows,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=9)


def largest(lengths: list[int], cut: list[list[int]]) -> int:
    return max(count_padded_tokens([max(1, lengths[row]) for row in rows]) for rows in cut)


def total(lengths: list[int], cut: list[list[int]]) -> int:
    return sum(count_padded_tokens([lengths[row] for row in rows]) for rows in cut)


@given(LENGTHS, st.integers(1, 5))
def test_every_row_once_in_as_many_groups_as_asked(lengths: list[int], count: int) -> None:
    cut = bucket_by_length(lengths, count)
    assert len(cut) == min(count, len(lengths))
    assert sorted(row for rows in cut for row in rows) == list(range(len(lengths)))
    assert all(cut)


@given(LENGTHS, st.integers(1, 5))
def test_the_largest_group_is_no_larger_than_in_an_equal_cut(lengths: list[int], size: int) -> None:
    equal = cut_batches(range(len(lengths)), size)
    assert largest(lengths, bucket_by_length(lengths, len(equal))) <= largest(lengths, equal)


@given(LENGTHS, st.integers(1, 4))
def test_no_cut_of_the_sorted_rows_has_a_smaller_largest_group(
    lengths: list[int], count: int
) -> None:
    count = min(count, len(lengths))
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    every = [
        [order[a:b] for a, b in zip((0, *stops), (*stops, len(order)), strict=True)]
        for stops in combinations(range(1, len(order)), count - 1)
    ]
    best = min(largest(lengths, cut) for cut in every)
    assert largest(lengths, bucket_by_length(lengths, count)) == best


def test_mixed_lengths_lose_most_of_their_padding() -> None:
    lengths = [5, 60, 7, 64, 6, 58, 5, 62] * 4
    equal = cut_batches(range(len(lengths)), 8)
    assert total(lengths, bucket_by_length(lengths, 4)) < 0.65 * total(lengths, equal)


@given(LENGTHS, st.integers(0, 60))
def test_packed_rows_fit_and_need_no_more_tokens_than_padded_ones(
    lengths: list[int], more: int
) -> None:
    limit = max(lengths) + more
    rows = pack_rows(lengths, limit)
    sums = [sum(lengths[row] for row in group) for group in rows]
    assert sorted(row for group in rows for row in group) == list(range(len(lengths)))
    assert max(sums) <= limit
    assert sum(a + b <= limit for a, b in combinations(sums, 2)) == 0 or not any(lengths)
