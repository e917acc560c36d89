"""Laws of the built-in task: right, repeatable, unseen tests, no cluster with the whole of it."""

from __future__ import annotations

import pytest

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.seq2seq import NUMBERS, generate_number_words, spell
from collapipe_flwr.data.tasks import load_task


def read(words: str) -> int:
    """The value of number words, by adding and multiplying: another way than ``spell``."""
    values = {spell(n): n for n in [*range(20), *range(20, 100, 10)]}
    total = current = 0
    for word in words.split():
        if word == "thousand":
            total, current = current * 1_000, 0
        elif word == "hundred":
            current *= 100
        else:
            current += values[word]
    return total + current


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (4_207, "four thousand two hundred seven"),
        (10_000, "ten thousand"),
        (99_999, "ninety nine thousand nine hundred ninety nine"),
    ],
)
def test_known_numbers(number: int, words: str) -> None:
    assert spell(number) == words


def test_spelling_can_be_read_back() -> None:
    assert all(read(spell(number)) == number for number in range(0, NUMBERS, 7))


def test_same_seed_same_examples_and_another_seed_others() -> None:
    first, second, other = (
        generate_number_words(train=50, test=5, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert first.to_list() == second.to_list()
    assert first.to_list() != other.to_list()


def test_no_number_comes_twice() -> None:
    train, test = generate_number_words(train=2_000, test=500, seed=0)
    targets = [*train["target"], *test["target"]]
    assert len(targets) == len(set(targets)) == 2_500


def test_examples_say_the_number_they_spell() -> None:
    train, _ = generate_number_words(train=200, test=1, seed=0)
    assert all(int(row["target"]) == read(row["source"]) for row in train.to_list())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_no_cluster_shares_a_leading_word_with_another(count: int) -> None:
    task = load_task(DataConfig(train_examples=2_000, test_examples=10))
    leading = [set(task.partition(index, count)["group"]) for index in range(count)]
    assert len(set().union(*leading)) == sum(len(words) for words in leading)


def test_more_numbers_than_there_are_is_an_error() -> None:
    with pytest.raises(DataError, match=r"data\.train-examples"):
        generate_number_words(train=NUMBERS, test=1, seed=0)
