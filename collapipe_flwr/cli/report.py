"""``collapipe report``, ``compare`` and ``watch``: pages and tables of runs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from collapipe_flwr.core.errors import mark_wrong_input, require
from collapipe_flwr.core.processes import stop_on_signals

if TYPE_CHECKING:
    from collapipe_flwr.reporting.live.feed import Find


def report(
    runs: Annotated[
        list[str], Argument(help="RUN_DIRECTORY or LABEL=RUN_DIRECTORY; may be repeated.")
    ],
    output: Annotated[
        Path | None,
        Option(
            "--output",
            "-o",
            help="File to write. Default: report.html in the run directory; of several runs, here.",
        ),
    ] = None,
) -> None:
    """Make the report of a run, or one page that compares several runs.

    Needs `pip install 'collapipe-flwr[report]'`. Prints the path of the page.
    """
    from collapipe_flwr.reporting.output import prepare
    from collapipe_flwr.reporting.report.page import write_reports

    with mark_wrong_input():
        prepare("--output", output)
        typer.echo(write_reports(runs, output))


def compare(
    runs: Annotated[list[str], Argument(help="RUN_DIRECTORY or LABEL=RUN_DIRECTORY.")],
    metrics: Annotated[
        str, Option(help="Metrics to show, such as loss,accuracy. Default: all.")
    ] = "",
    plot: Annotated[Path | None, Option(help="Draw the curves to this file.")] = None,
) -> None:
    """Print learning curves and costs of several runs side by side, as Markdown."""
    from collapipe_flwr.reporting.comparison import draw, read_runs, render_markdown

    if plot is not None:
        require("matplotlib", "plot")
    chosen = [m.strip() for m in metrics.split(",") if m.strip()]
    with mark_wrong_input():
        curves = read_runs(runs)
        tables = render_markdown(curves, chosen)
        if plot is not None:
            draw(curves, plot, chosen)
    typer.echo(tables, nl=False)


def watch(
    run: Annotated[
        str | None,
        Argument(
            help="Run directory, which need not exist yet; with --superlink, a run id. Default: "
            "the newest."
        ),
    ] = None,
    output_dir: Annotated[
        Path, Option(help="Folder of run directories, for the newest of them.")
    ] = Path("runs"),
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = 0,
    superlink: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Follow a run on this SuperLink, a connection that `flwr` knows, through its log. "
            "The run needs reporting.log-lines=true.",
        ),
    ] = None,
) -> None:
    """Show a run in the browser while it goes on; print the URL and serve until Ctrl-C.

    Without RUN, the page goes on to a newer run as soon as there is one. Beyond loopback, the URL
    holds a token, without which nothing is shown.
    """
    from collapipe_flwr.reporting.live.feed import run_finder

    if superlink is None:
        with mark_wrong_input():
            find = run_finder(None if run is None else Path(run), output_dir)
        if (found := find()) is None or not any(found.glob("*")):
            typer.echo(
                f"there is no run in {found or output_dir} yet: the page waits for it; Ctrl-C ends",
                err=True,
            )
        _serve(find, host, port)
        return
    from collapipe_flwr.federation.run.superlink_run import SuperLinkRun

    with TemporaryDirectory(prefix="collapipe-watch-") as folder:
        with mark_wrong_input():
            followed = SuperLinkRun(superlink, run, Path(folder))
        with followed.following():
            _serve(lambda: followed.run_dir, host, port)


def _serve(find: Find, host: str, port: int) -> None:
    from collapipe_flwr.reporting.live.feed import Feed
    from collapipe_flwr.reporting.live.server import LiveServer

    feed = Feed(find)
    with mark_wrong_input():
        server = LiveServer(feed, host, port)
    if server.token:
        typer.echo(
            f"{host} can be reached from other machines: everyone with this URL sees the run, and "
            "it is not encrypted.",
            err=True,
        )
    with stop_on_signals() as stop, server.serve(), feed.follow():
        typer.echo(server.url)
        stop.wait()
