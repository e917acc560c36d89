"""Tables and plots of simulations."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.figures import colour
from collapipe_flwr.reporting.simulation import run_simulation
from collapipe_flwr.reporting.simulation_figures import describe, draw_figures
from collapipe_flwr.scheduler.policies import POLICIES
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.score import Score
from collapipe_flwr.simulation.setting import ModelShape, Setting, preset
from collapipe_flwr.simulation.simulate import Simulation, simulate
from tests.reporting.pictures import assert_readable

SMALL = Setting(
    clusters=1,
    devices=2,
    examples=100,
    rounds=2,
    policies=("uniform", "dssda"),
    model=ModelShape(blocks=3, width=64, tokens=16),
    settings=SchedulerConfig(micro_batch_sizes=(2,), micro_batches=(2, 4)),
)


def test_plot_writes_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run_simulation(SMALL, plot_dir=tmp_path / "plots")
    made = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert made == ["latency.png", "queues.png", "segments.png", "tradeoff.png"]
    shown = capsys.readouterr().out
    assert "uniform" in shown and "latency.png" in shown


@pytest.fixture(scope="module")
def everything() -> Simulation:
    return simulate(replace(SMALL, policies=POLICIES, seeds=(3, 4), preset="paper"))


def tradeoff(simulation: Simulation) -> dict[float, Score]:
    return dict.fromkeys((0.1, 1.0, 10.0), simulation.policies[0].scores[0])


def test_every_policy_is_seen_and_no_legend_covers_a_curve(everything: Simulation) -> None:
    pytest.importorskip("matplotlib")
    found = draw_figures(everything, tradeoff(everything))
    ran = [p.policy for p in everything.policies if p.refusal is None]
    assert len(ran) >= 7
    for figure in found.values():
        assert_readable(figure)
    for name in ("latency", "queues"):
        lines = found[name].axes[0].lines
        assert [line.get_label() for line in lines] == ran
        assert len({line.get_color() for line in lines}) == len(ran)
        assert [text.get_text() for text in found[name].legends[0].get_texts()] == ran
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}
        assert len(looks) == len(ran)
    rows = [label.get_text().split()[0] for label in found["segments"].axes[0].get_yticklabels()]
    assert rows == ran


def test_pictures_name_preset_and_seeds(everything: Simulation) -> None:
    pytest.importorskip("matplotlib")
    captions = {
        name: f.get_supxlabel()
        for name, f in draw_figures(everything, tradeoff(everything)).items()
    }
    assert all(text.startswith("preset paper, changed; 1 clusters") for text in captions.values())
    assert captions["latency"].endswith("median over seeds 3, 4")
    assert captions["queues"].endswith("worst of seeds 3, 4")
    assert captions["segments"].endswith("seed 3")
    assert describe(replace(preset("paper"), seeds=(9,))).startswith("preset paper; 4 clusters")


def test_plot_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'collapipe-flwr\[plot\]'"):
        run_simulation(SMALL, plot_dir=tmp_path)


def test_every_policy_has_a_colour_of_its_own() -> None:
    assert len({colour(number) for number in range(len(POLICIES))}) == len(POLICIES)
