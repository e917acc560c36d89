"""Metrics over texts: predictions against references, pair by pair."""

from __future__ import annotations

from collections.abc import Sequence


def match_rate(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The share of predictions, in 0 .. 1, that equal their reference but for outer spaces."""
    pairs = zip(predictions, references, strict=True)
    hits = sum(prediction.strip() == reference.strip() for prediction, reference in pairs)
    return hits / max(1, len(references))


def chrf(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Corpus chrF of sacrebleu, 0 .. 100."""
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().corpus_score(list(predictions), [list(references)]).score)


def bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU of sacrebleu (13a tokens), 0 .. 100."""
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU().corpus_score(list(predictions), [list(references)]).score)
