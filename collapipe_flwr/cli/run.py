"""``collapipe run`` and ``collapipe compare``: run the app, and show runs side by side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from collapipe_flwr.core.errors import CollaPipeError


def run(
    project: Annotated[Path, typer.Argument(help="Folder of the Flower app.")] = Path("."),
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help="KEY=VALUE or a .toml file; may be repeated."),
    ] = None,
    federation_config: Annotated[
        Path | None,
        typer.Option(help="TOML file with num-supernodes, client-resources-num-cpus, ..."),
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Folder for run directories.")] = Path("runs"),
    resume: Annotated[
        Path | None,
        typer.Option(help="Run directory to resume from its newest checkpoint."),
    ] = None,
) -> None:
    """Run the app with `flwr run . --stream` on a private SuperLink and exit by its outcome.

    Unlike plain `flwr run --stream`, the exit code is 1 when the run did not complete.
    The last line printed is the path of the run directory.
    """
    from collapipe_flwr.federation.launcher import Launch, check_overrides, read_overrides, run_app
    from collapipe_flwr.reporting.console import summary_table
    from collapipe_flwr.reporting.run_directory import read_summary, resumed_config

    overrides = read_overrides(run_config or ())
    check_overrides(project, overrides)
    run_dir = output_dir.resolve() / time.strftime("%Y%m%d-%H%M%S")
    if resume is not None:
        run_dir = resume.resolve()
        overrides = resumed_config(run_dir, overrides)
    overrides = {"train.state-dir": str(run_dir / "clusters"), **overrides}
    launch = Launch(
        app=project.resolve(),
        output_dir=run_dir.parent,
        run_name=run_dir.name,
        run_config=overrides,
        federation_config=federation_config,
    )
    first_error = run_app(launch)
    summary = read_summary(launch.run_dir)
    if summary is None:
        raise CollaPipeError(first_error or "the run ended early; the reason stands above")
    Console().print(summary_table(summary))
    if summary["status"] != "completed":
        raise CollaPipeError(f"the run failed: {summary['reason']} (see {launch.run_dir})")
    typer.echo(launch.run_dir)


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
