"""Laws of the order: repeatable, each example once per pass, own order per cluster and pass."""

from __future__ import annotations

from collections import Counter

from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.data.batches import cut_batches, draw_round_examples, draw_round_rows

SIZES = st.integers(1, 40)


def rows(size: int, rounds_done: int, *, limit: int, cluster_id: int = 0) -> list[int]:
    return draw_round_rows(
        size, seed=5, rounds_done=rounds_done, cluster_id=cluster_id, limit=limit
    )


def spread(chosen: list[int], size: int) -> int:
    """How many times more often the most frequent row comes than the rarest."""
    counts = Counter(chosen)
    return max(counts.values()) - min(counts[row] for row in range(size))


@given(SIZES, st.integers(0, 60), st.integers(0, 5))
def test_a_round_has_its_limit_and_can_be_repeated(size: int, limit: int, rounds_done: int) -> None:
    chosen = rows(size, rounds_done, limit=limit)
    assert len(chosen) == (limit or size)
    assert rows(size, rounds_done, limit=limit) == chosen


@given(SIZES, st.integers(0, 100), st.integers(1, 25))
def test_every_row_is_used_equally_often_in_any_number_of_rounds(
    size: int, limit: int, rounds: int
) -> None:
    used: list[int] = []
    for done in range(rounds):
        chosen = rows(size, done, limit=limit)
        used += chosen
        assert spread(chosen, size) <= 1, "within a round"
        assert spread(used, size) <= 1, "in all rounds"


def test_no_row_comes_twice_in_a_round_that_begins_one_pass_and_ends_in_the_next() -> None:
    for done in range(10):
        assert len(set(rows(1_000, done, limit=600))) == 600


@given(SIZES, st.integers(1, 10))
def test_nothing_comes_again_before_all_came_once(size: int, limit: int) -> None:
    stream = [row for index in range(2 * size) for row in rows(size, index, limit=limit)]
    for start in range(0, len(stream) - size + 1, size):
        assert sorted(stream[start : start + size]) == list(range(size))


def test_clusters_and_passes_have_their_own_order() -> None:
    orders = [
        rows(30, index, limit=0, cluster_id=cluster) for index in (0, 1) for cluster in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4


def test_batches_hold_the_rows_in_order_and_the_last_may_be_smaller() -> None:
    examples = Dataset.from_dict({"text": [str(row) for row in range(10)]})
    chosen = draw_round_examples(examples, seed=5, rounds_done=1, cluster_id=0, limit=7)
    made = cut_batches(chosen, 3)
    assert [len(batch) for batch in made] == [3, 3, 1]
    texts = [example["text"] for batch in made for example in batch]
    assert texts == [str(row) for row in rows(10, 1, limit=7)]
