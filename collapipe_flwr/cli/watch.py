"""``collapipe watch``: a run in the browser while it goes on."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collapipe_flwr.reporting.live.feed import Find


def watch(
    run: Annotated[
        str | None,
        typer.Argument(
            help="Run directory, which may come to be later; with --superlink, a run id. Default: "
            "the newest."
        ),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option(help="Folder of run directories, for the newest of them.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0: a free one.", min=0, max=65535)
    ] = 0,
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Follow a run on this SuperLink, a connection that `flwr` knows, through its log. "
            "The run needs reporting.log-lines=true.",
        ),
    ] = None,
) -> None:
    """Show a run in the browser while it goes on: prints the URL, and serves until Ctrl-C.

    Without RUN, the page goes on to a newer run as soon as there is one. Beyond loopback, the URL
    holds a token, without which nothing is shown.
    """
    from collapipe_flwr.core.errors import wrong_input
    from collapipe_flwr.reporting.live.feed import run_finder

    if superlink is None:
        with wrong_input():
            find = run_finder(None if run is None else Path(run), output_dir)
        _serve(find, host, port)
        return
    from collapipe_flwr.federation.run.superlink_run import SuperLinkRun

    with TemporaryDirectory(prefix="collapipe-watch-") as folder:
        with wrong_input():
            followed = SuperLinkRun(superlink, run, Path(folder))
        with followed.following():
            _serve(lambda: followed.run_dir, host, port)


def _serve(find: Find, host: str, port: int) -> None:
    from collapipe_flwr.core.errors import wrong_input
    from collapipe_flwr.core.processes import stopping
    from collapipe_flwr.reporting.live.feed import Feed
    from collapipe_flwr.reporting.live.server import Bind, LiveServer

    feed = Feed(find)
    with wrong_input():
        server = LiveServer(feed, Bind.at(host, port))
    if server.bind.token:
        typer.echo(
            f"{host} can be reached from other machines: whoever has this URL sees the run, and it "
            "is not encrypted.",
            err=True,
        )
    with stopping() as stop, server.serving(), feed.following():
        typer.echo(server.url)
        stop.wait()
