"""What the command ``simulate`` shows and writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Console

from collapipe_flwr.reporting.figures import check_plot, save_figures
from collapipe_flwr.reporting.output import prepare, progress, write_json
from collapipe_flwr.reporting.tables import (
    claims_table,
    codec_lines,
    policy_table,
    refusals,
)
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.simulate import (
    FACTORS,
    OURS,
    Simulation,
    TradeoffPoint,
    penalty_sweep,
    simulate,
)
from collapipe_flwr.simulation.summary import Json, comparison, simulation_json, summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where results go besides the terminal."""

    json_file: Path | None = None
    plot_dir: Path | None = None

    def check(self) -> None:
        """Fail before the work rather than after it; raises ConfigError."""
        if self.json_file is not None:
            prepare("--json", self.json_file)
        if self.plot_dir is not None:
            check_plot(self.plot_dir)


def run_simulation(setting: Setting, outputs: Outputs) -> None:
    """Simulate with a progress bar, print tables, write files."""
    outputs.check()
    steps = setting.rounds * len(setting.seeds) * len(setting.policies)
    with progress(steps) as tick:
        simulation = simulate(setting, tick)
    _print_simulation(simulation)
    if outputs.json_file is not None:
        write_json(outputs.json_file, simulation_json(simulation))
    if outputs.plot_dir is not None:
        _plot(simulation, outputs.plot_dir)


def _print_simulation(simulation: Simulation) -> None:
    console = Console(highlight=False)
    console.print(policy_table(simulation))
    for sentence in (*codec_lines(simulation), *refusals(simulation)):
        console.print(sentence, markup=False)
    compared = comparison(summaries(simulation))
    if compared is not None:
        console.print(claims_table(cast("dict[str, Json]", compared["claims"])))


def _plot(simulation: Simulation, folder: Path) -> None:
    setting = simulation.setting
    sweep: tuple[TradeoffPoint, ...] = ()
    if simulation.policy(OURS) is not None:
        with progress(setting.rounds * len(FACTORS)) as tick:
            sweep = penalty_sweep(setting, lambda _: tick("trade-off"))
    for path in save_figures(simulation, sweep, folder):
        Console().print(str(path), markup=False, highlight=False, soft_wrap=True)
