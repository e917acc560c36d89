"""Metrics over texts: counts that add up over parts of a test set, and values of their sums.

Averages of parts cannot be averaged, since parts differ in words and entities. Counts can be
added, so clusters with a share of the test each get the value of the whole test together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from collapipe_flwr.core.errors import name_extra

Texts = Sequence[str]
Counts = list[float]
Tally = dict[str, Counts]  # by metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A metric: counts of predictions against references, and the value of added counts."""

    count: Callable[[Texts, Texts], Counts]
    value: Callable[[Counts], float]

    def __call__(self, predictions: Texts, references: Texts) -> float:
        """Return the metric of one set of pairs."""
        return self.value(self.count(predictions, references))


def add_counts(one: Mapping[str, Counts], other: Mapping[str, Counts]) -> Tally:
    """Add the counts of two parts; a part may have none at all."""
    if not one or not other:
        return dict(one or other)
    return {name: [a + b for a, b in zip(one[name], other[name], strict=True)] for name in one}


def ratio(counts: Counts) -> float:
    """Return the first count per unit of the second."""
    return counts[0] / max(1.0, counts[1])


def _count_matches(predictions: Texts, references: Texts) -> Counts:
    pairs = zip(predictions, references, strict=True)
    hits = sum(prediction.strip() == reference.strip() for prediction, reference in pairs)
    return [float(hits), float(len(references))]


def _make_sacrebleu(name: str) -> Measure:
    """Make a corpus score of sacrebleu, 0 .. 100, which is imported on first use.

    Its statistics are available by private methods only.
    """

    def metric() -> Any:
        with name_extra("metrics"):
            from sacrebleu import metrics
        return getattr(metrics, name)()

    def count(predictions: Texts, references: Texts) -> Counts:
        found = metric()._extract_corpus_statistics(list(predictions), [list(references)])
        return [float(sum(column)) for column in zip(*found, strict=True)]

    def value(counts: Counts) -> float:
        return float(metric()._compute_score_from_stats([int(count) for count in counts]).score)

    return Measure(count=count, value=value)


def _count_words(predictions: Texts, references: Texts) -> Counts:
    return _count_matches(" ".join(predictions).split(), " ".join(references).split())


match_rate = Measure(count=_count_matches, value=ratio)  # 0 .. 1, outer spaces left out
word_accuracy = Measure(count=_count_words, value=ratio)
chrf = _make_sacrebleu("CHRF")
bleu = _make_sacrebleu("BLEU")  # tokens as in 13a


OUTSIDE = "O"
_PREFIXES = frozenset("BIES")
Entity = tuple[str, int, int]  # type, first word, word after the last


def find_entities(tags: Sequence[str]) -> set[Entity]:
    """Find the entities of one sentence, as conlleval counts them.

    Tags are ``B-PER``, ``I-PER``, ``O`` (also ``E-`` and ``S-``); a tag without a prefix is a type
    of its own and continues while it repeats. An entity begins at B or S, after O, after E or S,
    and where the type changes, so that sequences that violate the scheme are counted too.
    """
    found: set[Entity] = set()
    start, before = 0, ("O", "")
    for place, tag in enumerate((*tags, OUTSIDE)):
        prefix, kind = _split_tag(tag)
        begins = prefix in "BS" or before[0] in (OUTSIDE, "E", "S") or before[1] != kind
        if before[0] != OUTSIDE and (prefix == OUTSIDE or begins):
            found.add((before[1], start, place))
        if prefix != OUTSIDE and begins:
            start = place
        before = (prefix, kind)
    return found


def _count_entities(predictions: Texts, references: Texts) -> Counts:
    """Count true positives, and predictions plus references; tags are joined by spaces."""
    hits = guessed = wanted = 0
    for predicted, reference in zip(predictions, references, strict=True):
        ours, theirs = find_entities(predicted.split()), find_entities(reference.split())
        hits, guessed, wanted = hits + len(ours & theirs), guessed + len(ours), wanted + len(theirs)
    return [float(hits), float(guessed + wanted)]


# micro-averaged F1, 0 .. 1, of exact spans and types
entity_f1 = Measure(
    count=_count_entities,
    value=lambda counts: 2 * counts[0] / counts[1] if counts[1] else 1.0,
)


def _split_tag(tag: str) -> tuple[str, str]:
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    return (prefix, kind) if dash and prefix in _PREFIXES else ("I", tag)


_WORD = re.compile(r"\w+")


def _make_average(score: Callable[[list[str], list[str]], float]) -> Measure:
    """Make the measure that is the mean of a score over pairs."""

    def count(predictions: Texts, references: Texts) -> Counts:
        pairs = zip(predictions, references, strict=True)
        return [
            fsum(score(_split_words(p), _split_words(r)) for p, r in pairs),
            float(len(references)),
        ]

    return Measure(count=count, value=ratio)


def count_longest_common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for place, other in enumerate(right, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]


def _split_words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _score_overlap(left: Sequence[str], right: Sequence[str], size: int) -> float:
    ours, theirs = _count_grams(left, size), _count_grams(right, size)
    return _compute_f1((ours & theirs).total(), ours.total(), theirs.total())


def _count_grams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[start:] for start in range(size)), strict=False))


def _compute_f1(hits: int, guessed: int, wanted: int) -> float:
    return 2 * hits / (guessed + wanted) if guessed + wanted else 0.0


# Our own implementation, after Lin (2004): lower-cased words without stemming, one reference, F1
# of each pair, mean over all pairs; 0 .. 1.
ROUGE = {
    "rouge1": _make_average(lambda p, r: _score_overlap(p, r, 1)),
    "rouge2": _make_average(lambda p, r: _score_overlap(p, r, 2)),
    "rougeL": _make_average(lambda p, r: _compute_f1(count_longest_common(p, r), len(p), len(r))),
}
