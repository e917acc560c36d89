"""Metrics: known values, and the ends of their scales."""

from __future__ import annotations

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from collapipe_flwr.data.metrics import ROUGE, add_counts, bleu, chrf, entity_f1, match_rate

TEXTS = ["the cat sat on the mat", "we all live in a yellow submarine"]


def test_match_rate_counts_pairs() -> None:
    assert match_rate(["1", "2 ", "3", "4"], ["1", "2", "3", "5"]) == 0.75


def test_match_rate_refuses_unequal_lengths() -> None:
    with pytest.raises(ValueError, match="zip"):
        match_rate(["1"], ["1", "2"])


@pytest.mark.parametrize("metric", [chrf, bleu])
def test_ends_of_the_scale(metric) -> None:  # type: ignore[no-untyped-def]
    assert metric(TEXTS, TEXTS) == pytest.approx(100)
    assert metric(["x", "z"], TEXTS) < 5 < metric(["the cat sat", TEXTS[1]], TEXTS) < 100


OURS = ["the cat sat on a mat", "it rains in the north", "no", "a dog and the cat sat here"]
WANTED = ["the cat sat on the mat", "it rained in the north", "yes", "the dog and a cat sat there"]
TAGS = ["B-X I-X O", "O B-Y O", "O", "B-X O O"]
WANTED_TAGS = ["B-X I-X O", "B-Y B-Y O", "O", "O B-X O"]
MEASURES = {
    "match": (match_rate, TAGS, WANTED_TAGS),
    "chrf": (chrf, OURS, WANTED),
    "bleu": (bleu, OURS, WANTED),
    "f1": (entity_f1, TAGS, WANTED_TAGS),
    **{name: (measure, OURS, WANTED) for name, measure in ROUGE.items()},
}


@pytest.mark.parametrize("name", MEASURES)
def test_counts_of_parts_add_up_where_averages_do_not(name: str) -> None:
    measure, ours, theirs = MEASURES[name]
    cuts = [slice(0, 1), slice(1, 4)]
    counts = [{name: measure.count(ours[cut], theirs[cut])} for cut in cuts]
    whole = measure(ours, theirs)
    assert measure.value(add_counts(add_counts({}, counts[0]), counts[1])[name]) == pytest.approx(
        whole
    )
    average = sum(measure(ours[cut], theirs[cut]) for cut in cuts) / 2
    assert average != pytest.approx(whole, rel=1e-3)


def test_scores_of_texts_are_those_of_sacrebleu() -> None:
    assert chrf(OURS, WANTED) == CHRF().corpus_score(OURS, [WANTED]).score
    assert bleu(OURS, WANTED) == BLEU().corpus_score(OURS, [WANTED]).score
