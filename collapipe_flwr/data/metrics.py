"""Metrics over texts, as counts that add up over parts of a test set, and what their sums mean.

A part's average cannot be averaged: parts differ in words and entities. Counts can be added, so
clusters that each know a share of the test find together what one machine would find on all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from collapipe_flwr.core.extras import extra

Texts = Sequence[str]
Counts = list[float]
Tally = dict[str, Counts]  # by metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A metric: counts of predictions against references, pair by pair, and its value."""

    count: Callable[[Texts, Texts], Counts]
    value: Callable[[Counts], float]

    def __call__(self, predictions: Texts, references: Texts) -> float:
        """The metric of one set of pairs."""
        return self.value(self.count(predictions, references))


def added(one: Mapping[str, Counts], other: Mapping[str, Counts]) -> Tally:
    """The counts of two parts together; a part may have none at all."""
    if not one or not other:
        return dict(one or other)
    return {name: [a + b for a, b in zip(one[name], other[name], strict=True)] for name in one}


def ratio(counts: Counts) -> float:
    """The first count per unit of the second."""
    return counts[0] / max(1.0, counts[1])


def _count_matches(predictions: Texts, references: Texts) -> Counts:
    pairs = zip(predictions, references, strict=True)
    hits = sum(prediction.strip() == reference.strip() for prediction, reference in pairs)
    return [float(hits), float(len(references))]


def _count_chrf(predictions: Texts, references: Texts) -> Counts:
    with extra("metrics"):
        from sacrebleu.metrics.chrf import CHRF

    return _sums(CHRF(), predictions, references)


def _chrf_of(counts: Counts) -> float:
    with extra("metrics"):
        from sacrebleu.metrics.chrf import CHRF

    return float(CHRF()._compute_score_from_stats([int(count) for count in counts]).score)


def _count_bleu(predictions: Texts, references: Texts) -> Counts:
    with extra("metrics"):
        from sacrebleu.metrics.bleu import BLEU

    return _sums(BLEU(), predictions, references)


def _bleu_of(counts: Counts) -> float:
    with extra("metrics"):
        from sacrebleu.metrics.bleu import BLEU

    return float(BLEU()._compute_score_from_stats([int(count) for count in counts]).score)


def _sums(metric: object, predictions: Texts, references: Texts) -> Counts:
    """What sacrebleu's corpus score is made of; it has no public name for that."""
    found = metric._extract_corpus_statistics(list(predictions), [list(references)])  # type: ignore[attr-defined]
    return [float(sum(column)) for column in zip(*found, strict=True)]


match_rate = Measure(count=_count_matches, value=ratio)  # 0 .. 1, outer spaces left out
chrf = Measure(count=_count_chrf, value=_chrf_of)  # corpus chrF of sacrebleu, 0 .. 100
bleu = Measure(count=_count_bleu, value=_bleu_of)  # corpus BLEU of sacrebleu (13a), 0 .. 100
