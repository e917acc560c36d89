"""ROUGE: worked examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collapipe_flwr.data.metrics import ROUGE, count_longest_common


def rouge(predictions: list[str], references: list[str]) -> dict[str, float]:
    return {name: measure(predictions, references) for name, measure in ROUGE.items()}


def test_worked_example() -> None:
    scores = rouge(["The cat sat on a mat."], ["the cat lay on the mat"])
    # words: the cat sat on a mat / the cat lay on the mat; common 4 of 6 and 6
    assert scores["rouge1"] == pytest.approx(4 / 6)
    assert scores["rouge2"] == pytest.approx(1 / 5)
    assert scores["rougeL"] == pytest.approx(4 / 6)


def test_order_matters_to_the_longest_common_subsequence_only() -> None:
    scores = rouge(["b a"], ["a b"])
    assert (scores["rouge1"], scores["rougeL"]) == (1.0, 0.5)


def test_nothing_predicted_scores_nothing() -> None:
    assert set(rouge([""], ["a b"]).values()) == {0.0}


def test_longest_common_subsequence_of_random_words(
    subsequence: Callable[[str, str], int],
) -> None:
    for left, right in [("abcbdab", "bdcaba"), ("", "a"), ("aaaa", "aa"), ("xyz", "abc")]:
        assert count_longest_common(list(left), list(right)) == subsequence(left, right)


@pytest.fixture
def subsequence() -> Callable[[str, str], int]:
    def longest(left: str, right: str) -> int:
        if not left or not right:
            return 0
        if left[0] == right[0]:
            return 1 + longest(left[1:], right[1:])
        return max(longest(left[1:], right), longest(left, right[1:]))

    return longest
