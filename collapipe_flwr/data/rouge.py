"""ROUGE of summaries: overlap of words, of pairs of words, and of the longest common subsequence.

Our own implementation, after Lin (2004): lower-cased words without stemming, one reference, F1 of
each pair, mean over all pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import fsum

from collapipe_flwr.data.metrics import Measure, ratio

_WORD = re.compile(r"\w+")


def rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """``rouge1``, ``rouge2`` and ``rougeL``, each in 0 .. 1."""
    return {name: measure(predictions, references) for name, measure in ROUGE.items()}


def _measure(score: Callable[[list[str], list[str]], float]) -> Measure:
    """The mean of a score over pairs."""

    def count(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
        pairs = zip(predictions, references, strict=True)
        return [fsum(score(_words(p), _words(r)) for p, r in pairs), float(len(references))]

    return Measure(count=count, value=ratio)


def longest_common(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for place, other in enumerate(right, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _overlap(left: Sequence[str], right: Sequence[str], size: int) -> float:
    ours, theirs = _grams(left, size), _grams(right, size)
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def _grams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(size)), strict=False))


def _f1(hits: int, guessed: int, wanted: int) -> float:
    return 2 * hits / (guessed + wanted) if guessed + wanted else 0.0


ROUGE = {
    "rouge1": _measure(lambda p, r: _overlap(p, r, 1)),
    "rouge2": _measure(lambda p, r: _overlap(p, r, 2)),
    "rougeL": _measure(lambda p, r: _f1(longest_common(p, r), len(p), len(r))),
}
