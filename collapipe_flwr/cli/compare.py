"""``collapipe compare``: runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    runs: Annotated[list[str], typer.Argument(help="LABEL=RUN_DIRECTORY, one per run.")],
    metrics: Annotated[
        str, typer.Option(help="Metrics to show, such as loss,accuracy. Default: all.")
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw the curves to this file.")] = None,
) -> None:
    """Print learning curves and costs of several runs side by side, as Markdown."""
    from collapipe_flwr.reporting.comparison import draw, markdown, read_curves

    curves = read_curves(runs)
    if plot is not None:
        draw(curves, plot)
    typer.echo(markdown(curves, [m for m in metrics.split(",") if m]), nl=False)
