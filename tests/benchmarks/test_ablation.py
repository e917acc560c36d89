"""The ablation of batches: its second task, and quartiles over seeds that may never arrive."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.ablation_digits import TEST_ROWS, leading_digits
from benchmarks.ablation_results import TARGETS, over_bound, quartiles
from collapipe_flwr.data.seq2seq import spell


def runs(*seconds: float | None) -> list[dict[str, dict[str, dict[str, float | None]]]]:
    """Seeds in which the variant took so long to every target, and the bound two seconds."""

    def one(value: float | None) -> dict[str, dict[str, float | None]]:
        return {"time_to_target_s": {str(share): value for share in TARGETS}}

    return [{"bound": one(2.0), "other": one(value)} for value in seconds]


def test_digits_are_those_of_the_thousands_and_no_number_is_in_both_parts(tmp_path: Path) -> None:
    parts = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in leading_digits(tmp_path, seed=3)
    ]
    texts = [{row["text"] for row in part} for part in parts]
    assert len(parts[1]) == len(texts[1]) == TEST_ROWS and not texts[0] & texts[1]
    known = {spell(n): f"d{n // 1000}" for n in range(10_000)}
    assert all(known[row["text"]] == row["label"] for part in parts for row in part)


def test_a_quartile_among_seeds_that_never_arrive_is_none() -> None:
    found = quartiles(runs(1.0, 2.0, 3.0, 4.0, None), "other")
    assert found["0.1"] == [2.0, 3.0, 4.0]
    assert quartiles(runs(1.0, None, 3.0, None, None), "other")["0.1"] == [3.0, None, None]


def test_ratios_are_geometric_means_and_none_where_a_seed_is_missing() -> None:
    assert over_bound(runs(1.0, 4.0), "other")["0.3"] == 1.0
    assert over_bound(runs(1.0, None), "other")["0.3"] is None
