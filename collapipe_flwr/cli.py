"""``collapipe``: arguments only; what a command does lives in the package below."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from collapipe_flwr.core.errors import CollaPipeError

app = typer.Typer(
    name="collapipe",
    help="Clusters of weak devices train one transformer as a single Flower client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    project: Annotated[Path, typer.Argument(help="Folder of the Flower app.")] = Path("."),
    run_config: Annotated[
        list[str] | None,
        typer.Option(
            "--run-config", "-c", help="KEY=VALUE or a .toml file; may be given several times."
        ),
    ] = None,
    federation_config: Annotated[
        Path | None, typer.Option(help="TOML with num-supernodes, client-resources-num-cpus, ...")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="Where run directories go.")] = Path("runs"),
) -> None:
    """Run the app with `flwr run . --stream` on a private SuperLink and exit by its outcome.

    Unlike plain `flwr run --stream`, the exit code is 1 when the run did not complete. The last
    line printed is the path of the run directory.
    """
    from collapipe_flwr.federation.launcher import Launch, run_app
    from collapipe_flwr.federation.overrides import read_overrides
    from collapipe_flwr.reporting.console import summary_table
    from collapipe_flwr.reporting.run_directory import read_summary

    launch = Launch(
        app=project.resolve(),
        output_dir=output_dir.resolve(),
        run_name=time.strftime("%Y%m%d-%H%M%S"),
        run_config=read_overrides(run_config or ()),
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


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(help="LABEL=RUN_DIRECTORY, one per run.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves into this file.")] = None,
) -> None:
    """Print learning curves and costs of several runs side by side, as Markdown."""
    from collapipe_flwr.reporting.comparison import draw, markdown, read_curves

    curves = read_curves(runs)
    if plot is not None:
        draw(curves, plot)
    typer.echo(markdown(curves), nl=False)


@app.command()
def edge(
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one.")] = (
        "127.0.0.1:50061"
    ),
) -> None:
    """Serve decoders (or heads) to clusters until SIGTERM or Ctrl-C.

    Point a run at it with the run-config key `edge.address`. Plain text: only for loopback and
    networks that you trust.
    """
    import signal
    import threading

    from collapipe_flwr.edge.server import EdgeServer
    from collapipe_flwr.edge.service import EdgeService

    stop = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: stop.set())
    with EdgeServer(listen, EdgeService()) as server:
        typer.echo(f"edge server on {server.address}")
        stop.wait()


def main() -> None:
    """Entry point: our errors become one sentence and exit code 1."""
    try:
        app()
    except CollaPipeError as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
