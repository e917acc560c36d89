"""A built-in task that takes real learning: English number words to digits.

"forty two thousand seven" -> "42007": copying does not help, since every word's digit depends on
the words that follow it, and absent places must be filled with zeros. The numbers of the test set
occur in no training set. Clusters get the numbers by their leading word, so that none of
them alone has seen the whole task.
"""

from __future__ import annotations

import numpy as np

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.core.extras import extra

with extra("data"):
    from datasets import Dataset

NUMBERS = 100_000  # 0 .. 99,999
DEFAULT_TRAIN_EXAMPLES = 6_000
DEFAULT_TEST_EXAMPLES = 500

# fmt: off
_UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
_TENS = [
    "", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
]
# fmt: on


def spell(number: int) -> str:
    """The words of a number in 0 .. 999,999, without "and" and hyphens."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        return _joined(_TENS[number // 10], number % 10)
    if number < 1_000:
        return _joined(f"{_UNITS[number // 100]} hundred", number % 100)
    return _joined(f"{spell(number // 1_000)} thousand", number % 1_000)


def _joined(words: str, rest: int) -> str:
    return f"{words} {spell(rest)}" if rest else words


def generate(*, train: int, test: int, seed: int) -> tuple[Dataset, Dataset]:
    """Training and test examples with columns source, target and group (the leading word).

    Sizes of 0 mean the defaults. The same seed gives the same numbers, none of them twice.
    Raises DataError if more numbers are asked for than there are.
    """
    train, test = train or DEFAULT_TRAIN_EXAMPLES, test or DEFAULT_TEST_EXAMPLES
    if train + test > NUMBERS:
        raise DataError(
            f"data.train-examples + data.test-examples must be <= {NUMBERS} for number-words, "
            f"got {train} + {test}"
        )
    numbers = np.random.default_rng(seed).permutation(NUMBERS).tolist()
    return _examples(numbers[test : test + train]), _examples(numbers[:test])


def _examples(numbers: list[int]) -> Dataset:
    sources = [spell(number) for number in numbers]
    return Dataset.from_dict(
        {
            "source": sources,
            "target": [str(number) for number in numbers],
            "group": [source.split(maxsplit=1)[0] for source in sources],
        }
    )
