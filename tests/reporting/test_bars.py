"""Bars of a round and the closing table are never wider than the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from collapipe_flwr.reporting.console import summary_table
from collapipe_flwr.reporting.progress import ClusterProgress, RunProgress
from collapipe_flwr.reporting.screen import Bars

WIDTHS = (20, 40, 60, 80, 200)
NOW_S = 1_000_000.0


def _lines(thing: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(thing)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def _round(*trained: int, at_s: float = 0.0, **more: float) -> RunProgress:
    clusters = {
        f"cluster-with-a-name-{index}": ClusterProgress(
            trained=done, of=400, per_step=4, examples=8, **more
        )
        for index, done in enumerate(trained)
    }
    return RunProgress(
        phase="training",
        since_s=NOW_S,
        at_s=NOW_S + at_s,
        round_index=3,
        rounds=12,
        clusters=clusters,
    )


def _shown(*progresses: RunProgress, width: int = 100) -> list[str]:
    bars = Bars(now=lambda: progresses[-1].at_s or NOW_S)
    for progress in progresses:
        bars.show(progress)
    return _lines(bars, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "progress",
    [
        RunProgress(phase="reading the data and the model " * 4, since_s=NOW_S - 4000),
        _round(),
        _round(200, 100, 399, at_s=9.0),
        _round(*range(40), at_s=9.0),
    ],
    ids=["a long phase", "no cluster", "three clusters", "forty clusters"],
)
def test_no_line_is_wider_than_the_terminal(width: int, progress: RunProgress) -> None:
    lines = _shown(progress, width=width)
    assert lines and max(map(len, lines)) <= width
    assert len(lines) <= 7


def test_a_round_shows_steps_examples_per_second_and_what_is_left() -> None:
    joined, *each = _shown(_round(0, 0), _round(200, 100, at_s=10.0))
    assert "round 3/12 training" in joined and "75/200 steps" in joined
    assert "240 ex/s" in joined  # (200 + 100) micro-batches of 8 in 10 s
    assert "0:30 left" in joined  # 300 micro-batches of the slower one at 10 per second
    assert ["50/100 steps" in each[0], "25/100 steps" in each[1]] == [True, True]
    assert "0:10 left" in each[0] and "0:30 left" in each[1]


def test_a_cluster_that_waits_for_another_counts_with_its_pace() -> None:
    joined, *_ = _shown(_round(0, 0), _round(200, 0, at_s=10.0))
    assert "0:30 left" in joined  # 600 micro-batches at 20 per second


def test_where_no_edge_counts_machines_have_the_bar_of_the_plan_which_says_so() -> None:
    cluster = ClusterProgress(predicted_s=60.0)
    told = RunProgress(phase="training", since_s=NOW_S, round_index=1, simulated=False)
    (line,) = _shown(RunProgress(**{**_fields(told), "clusters": {"A": cluster}}))
    assert "left, as predicted" in line
    (line,) = _shown(
        RunProgress(**{**_fields(told), "clusters": {"A": cluster}, "simulated": True})
    )
    assert "predicted" not in line and "━" not in line  # simulated seconds predict no real end


def _fields(progress: RunProgress) -> dict[str, object]:
    return {name: getattr(progress, name) for name in progress.__slots__}


def _summary(devices: int) -> dict[str, object]:
    names = [f"cluster-{i % 9}/{i}-raspberry-pi-4" for i in range(devices)]
    way = {"bytes": 5_000_000, "sending_s": 1.0, "bit_per_s": 4e6, "planned_bit_per_s": 5e6}
    ends = {"sender": names[0], "receiver": names[-1], "codec": "int8"}
    return {
        "status": "completed",
        "metric": {"name": "exact_match", "initial": 0.0, "final": 0.5},
        "clusters": {"loss": 0.4, "exact_match": 0.5},
        "rounds": 100,
        "rounds_asked": 100,
        "wall_s": 3600.0,
        "lost": {f"cluster-{i}": list(range(1, 40)) for i in range(9)},
        "never_trained": [f"cluster-{i}" for i in range(9)],
        "prediction_error": 0.1,
        "bytes": {"d2d": 1, "d2e": 1, "flower": 1, "weights": 1, "spared": 1},
        "links": [{"cluster": "c", **ends, "forward": way, "backward": way}] * devices,
        "energy": {
            "budget_j": dict.fromkeys(names, 1.0),
            "mean_j": {name: 1.5 if i == 7 else 0.5 for i, name in enumerate(names)},
        },
        "model_share": {"most": 0.31, "cap": 1 / 3},
        "peak_memory_bytes": dict.fromkeys(names, 10_000_000),
    }


def test_the_closing_table_fits_a_screen_and_names_overruns_first() -> None:
    lines = _lines(summary_table(_summary(1000)), 80)
    assert max(map(len, lines)) <= 80 and len(lines) <= 21  # of 24: the path, and the prompt
    assert any("31 % of the whole model (33.3 % allowed)" in line for line in lines)
    energy = [line for line in lines if line.startswith("energy")]
    assert "over budget" in energy[0] and "over budget" not in energy[1]
    assert "998 links, 996 budgets, 997 peaks in summary.json" in lines[-1]


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_folds_the_table_and_loses_nothing(width: int) -> None:
    lines = _lines(summary_table(_summary(3), folds=True), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
