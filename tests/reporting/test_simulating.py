"""Tables and plots of simulations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.simulation import run_simulation
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.models import ModelShape
from collapipe_flwr.simulation.setting import Setting

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


def test_plot_without_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'collapipe-flwr\[plot\]'"):
        run_simulation(SMALL, plot_dir=tmp_path)
