"""What a report consists of: of one run, and of several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collapipe_flwr.reporting.report.charts import Section
from collapipe_flwr.reporting.report.energy import compared_energy, energy
from collapipe_flwr.reporting.report.incidents import incidents
from collapipe_flwr.reporting.report.learning import compared_learning, learning
from collapipe_flwr.reporting.report.links import compared_links, links
from collapipe_flwr.reporting.report.memory import memory
from collapipe_flwr.reporting.report.overview import compared_overview
from collapipe_flwr.reporting.report.placement import placement
from collapipe_flwr.reporting.report.run_data import RunData
from collapipe_flwr.reporting.report.settings import compared_settings, settings
from collapipe_flwr.reporting.report.steps import steps
from collapipe_flwr.reporting.report.times import compared_times, times

FIGURES = (learning, placement, times, energy, links, memory, incidents)


def run_sections(run: RunData, run_dir: Path | None = None) -> list[Section]:
    """All of one run; ``run_dir`` is where its timelines are."""
    return [*(section(run) for section in FIGURES), steps(run_dir), settings(run)]


def compared_sections(runs: Sequence[RunData]) -> list[Section]:
    """Several runs side by side."""
    parts = (compared_overview, compared_learning, compared_times, compared_energy)
    return [part(runs) for part in (*parts, compared_links, compared_settings)]
