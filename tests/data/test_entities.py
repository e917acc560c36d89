"""Entity F1: worked examples of the conlleval rules, and its bounds."""

from __future__ import annotations

import pytest

from collapipe_flwr.data.metrics import entity_f1, find_entities


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("O O", set()),
        ("B-PER I-PER O", {("PER", 0, 2)}),
        ("B-PER B-PER", {("PER", 0, 1), ("PER", 1, 2)}),
        ("I-PER I-LOC I-LOC", {("PER", 0, 1), ("LOC", 1, 3)}),
        ("O I-PER", {("PER", 1, 2)}),
        ("B-PER E-PER I-PER S-PER", {("PER", 0, 2), ("PER", 2, 3), ("PER", 3, 4)}),
        ("B-PER O I-PER", {("PER", 0, 1), ("PER", 2, 3)}),
        ("NOUN NOUN VERB", {("NOUN", 0, 2), ("VERB", 2, 3)}),
        ("B-A-B I-A-B", {("A-B", 0, 2)}),
    ],
)
def test_entities_of_a_sentence(tags: str, entities: set[tuple[str, int, int]]) -> None:
    assert find_entities(tags.split()) == entities


def test_f1_counts_exact_spans_over_all_sentences() -> None:
    wanted = ["B-PER I-PER O B-LOC", "O O B-ORG I-ORG"]
    guessed = ["B-PER I-PER O B-ORG", "O O B-ORG O"]
    # hits 1 (PER), guessed 3, wanted 3
    assert entity_f1(guessed, wanted) == pytest.approx(2 * 1 / 6)
    assert entity_f1(wanted, wanted) == 1.0
    assert entity_f1(["O O O O"] * 2, wanted) == 0.0
