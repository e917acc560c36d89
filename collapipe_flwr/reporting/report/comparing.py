"""Which runs a report is asked of, by folders and labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.reporting.report.page import (
    REPORT,
    compared_page,
    require_report,
    write_page,
    write_run_report,
)
from collapipe_flwr.reporting.report.run_data import read_run
from collapipe_flwr.reporting.run_directory import read_summary


def write_reports(sources: Sequence[str], output: Path | None) -> Path:
    """The page of one run, or of several compared; returns where it was written.

    Raises ConfigError for a folder of no run or a missing extra.
    """
    require_report()
    named = [_named(source) for source in sources]
    if len(named) == 1:
        (name, folder) = named[0]
        return write_run_report(folder, output, name)
    page = compared_page([read_run(folder, name) for name, folder in named])
    return write_page(page, output or Path(REPORT))


def _named(source: str) -> tuple[str, Path]:
    """``LABEL=FOLDER``, or a folder, which is its own label."""
    label, equals, folder = source.partition("=")
    path = Path(source) if not equals or Path(source).is_dir() else Path(folder)
    if read_summary(path) is None:
        raise ConfigError(f"{path} is not the folder of a run: it has no summary.json")
    return (label if path != Path(source) else ""), path
