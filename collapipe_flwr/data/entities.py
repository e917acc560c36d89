"""Entities in tagged sentences, and their F1 as conlleval counts it.

Tags read ``B-PER``, ``I-PER``, ``O`` (also ``E-`` and ``S-``); a tag without a prefix is a type of
its own and continues while it repeats. An entity begins at B or S, behind O, behind E or S, and
where the type changes; so sequences that break the scheme still mean something.
"""

from __future__ import annotations

from collections.abc import Sequence

from collapipe_flwr.data.metrics import Measure

OUTSIDE = "O"
_PREFIXES = frozenset("BIES")
Entity = tuple[str, int, int]  # type, first word, word behind the last


def find_entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of one sentence."""
    found: set[Entity] = set()
    start, before = 0, ("O", "")
    for place, tag in enumerate((*tags, OUTSIDE)):
        prefix, kind = _split(tag)
        if before[0] != OUTSIDE and _ends(before, prefix, kind):
            found.add((before[1], start, place))
        if prefix != OUTSIDE and _begins(before, prefix, kind):
            start = place
        before = (prefix, kind)
    return found


def _count_entities(predictions: Sequence[str], references: Sequence[str]) -> list[float]:
    """Hits, and all that were guessed or wanted; sentences are tags joined by spaces."""
    hits = guessed = wanted = 0
    for predicted, reference in zip(predictions, references, strict=True):
        ours, theirs = find_entities(predicted.split()), find_entities(reference.split())
        hits, guessed, wanted = hits + len(ours & theirs), guessed + len(ours), wanted + len(theirs)
    return [float(hits), float(guessed + wanted)]


def _f1_of(counts: list[float]) -> float:
    hits, both = counts
    return 2 * hits / both if both else 1.0


# micro-averaged F1, 0 .. 1, of exact spans and types
entity_f1 = Measure(count=_count_entities, value=_f1_of)


def _split(tag: str) -> tuple[str, str]:
    if tag == OUTSIDE:
        return OUTSIDE, ""
    prefix, dash, kind = tag.partition("-")
    return (prefix, kind) if dash and prefix in _PREFIXES else ("I", tag)


def _begins(before: tuple[str, str], prefix: str, kind: str) -> bool:
    return prefix in "BS" or before[0] in (OUTSIDE, "E", "S") or before[1] != kind


def _ends(before: tuple[str, str], prefix: str, kind: str) -> bool:
    return prefix == OUTSIDE or _begins(before, prefix, kind)
