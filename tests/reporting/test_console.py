"""The lines of a round in plain output, and the table at the end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.reporting.console import ProgressPrinter, summary_table
from collapipe_flwr.reporting.events import RoundEvent, describe_share_cap
from collapipe_flwr.reporting.run_data import RunData
from tests.reporting.made_up_runs import MadeUpRun


def test_empty_energy_queues_have_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    queues_j = {"A/1": -0.0, "A/2": -0.0}
    event = RoundEvent(round_index=1, wall_s=1.0, metrics={}, loss=1.0, queues_j=queues_j)
    ProgressPrinter(1).show(event)
    assert "energy queue at most 0 J" in capsys.readouterr().out


@pytest.mark.parametrize(("clusters", "devices"), [(2, 3), (40, 3), (1, 200)])
def test_in_a_pipe_no_line_of_a_round_is_long(
    capsys: pytest.CaptureFixture[str], clusters: int, devices: int
) -> None:
    segments = [
        {"device_id": f"c/{n}-raspberry-pi-4", "first_block": n, "stop_block": n + 1}
        for n in range(devices)
    ]
    plan = {
        "latency_s": 3.1,
        "clusters": [
            {
                "cluster_id": f"c{number}",
                "segments": segments,
                "micro_batch_size": 8,
                "micro_batches": 4,
            }
            for number in range(clusters)
        ],
    }
    event = RoundEvent(round_index=1, wall_s=1.0, metrics={}, loss=1.0, plan=plan)
    ProgressPrinter(1).show(event)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120 and len(lines) <= 6
    shown = sum(line.startswith("    plan c") for line in lines)
    assert shown == min(clusters, 3)
    assert (f"    and {clusters - shown} plans more in events.jsonl" in lines) == (shown < clusters)


def rows(summary: dict[str, Any]) -> dict[str, str]:
    """The table at the end of a run: texts by the names of their rows."""
    table = summary_table(summary)
    names, texts = (list(column.cells) for column in table.columns)
    return {str(name): str(text) for name, text in zip(names, texts, strict=True)}


def ended(path: Path, rounds: int, policy: str = "dssda") -> dict[str, Any]:
    """The summary of a run with devices above and below their budgets."""
    run = MadeUpRun(path / "run")
    for _ in range(rounds):
        run.end_round()
    found = run.story.summary(status="completed", wall_s=1.0)
    return {**found, "plan": {**found["plan"], "policy": policy}}


def test_every_number_of_the_table_says_what_it_is(tmp_path: Path) -> None:
    found = rows(ended(tmp_path, 2))
    assert found["traffic in MB"] == "device to device 20, to edge 2, Flower 200"
    link = next(text for name, text in found.items() if name.startswith("link "))
    assert re.fullmatch(r"fp32  there [\d.]+ of [\d.]+, back [\d.]+ of [\d.]+ Mbit/s", link)
    peak = next(text for name, text in found.items() if name.startswith("memory "))
    assert re.fullmatch(r"measured peak [\d.]+ of 120.0 MB allowed", peak)
    assert not any(name.endswith("/cu") for name in found)


@pytest.mark.parametrize(
    ("rounds", "policy", "early"), [(3, "dssda", True), (12, "dssda", False), (3, "fedavg", False)]
)
def test_a_budget_is_broken_only_where_nothing_pays_back(
    tmp_path: Path, rounds: int, policy: str, early: bool
) -> None:
    summary = ended(tmp_path, rounds, policy)
    summary["energy"]["mean_j"] = dict.fromkeys(summary["energy"]["mean_j"], 3.0)
    found = rows(summary)
    above = [text for name, text in found.items() if name.startswith("energy ")]
    assert above and all(("above so far" in text) == early for text in above)
    assert all(("over budget" in text) != early for text in above)
    assert ("budgets" in found) == early


def _shares(share: float, cap: float) -> dict[str, float | None]:
    data = RunData("")
    data.add({"round_index": 1, "clusters": {"A": {"model_share": share, "model_share_cap": cap}}})
    found = data.share_json(0.5)
    assert found is not None
    return found


def test_a_share_above_the_one_that_was_set_says_why() -> None:
    above = " (64.5 % allowed, as no plan keeps the 50 % set)"
    assert describe_share_cap(_shares(0.6, 0.645)) == above
    assert describe_share_cap(_shares(0.4, 0.5)) == " (50 % allowed)"


def test_what_kept_states_spared_is_said(tmp_path: Path) -> None:
    found = ended(tmp_path, 2)
    assert "frozen blocks" not in rows(found)
    data = RunData("")
    spared = {"hits": 3, "visits": 4, "seconds": 20.0, "joules": 1.5}
    for index in (1, 2):
        data.add({"round_index": index, "spared": {"A": spared}})
    told = rows({**found, "spared": dict(data.spared)})["frozen blocks"]
    assert told == "kept for 75 % of visits, which spared 40 s and 3 J"
