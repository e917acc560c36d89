"""``collapipe report``: the page of a run, or of several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[str], typer.Argument(help="RUN_DIRECTORY or LABEL=RUN_DIRECTORY; may be repeated.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write. Default: report.html in the run directory; of several runs, here.",
        ),
    ] = None,
) -> None:
    """Make the report of a run anew, or one page that compares several runs.

    Needs `pip install 'collapipe-flwr[report]'`. Prints the path of the page.
    """
    from collapipe_flwr.core.errors import wrong_input
    from collapipe_flwr.reporting.output import prepare
    from collapipe_flwr.reporting.report.page import write_reports

    with wrong_input():
        prepare("--output", output)
        typer.echo(write_reports(runs, output))
