"""``collapipe watch``: a run in the browser while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def watch(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run directory, which may come to be later. Default: the newest."),
    ] = None,
    output_dir: Annotated[
        Path, typer.Option(help="Folder of run directories, for the newest of them.")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0: a free one.", min=0, max=65535)
    ] = 0,
) -> None:
    """Show a run in the browser while it goes on: prints the URL, and serves until Ctrl-C.

    Without RUN, the page goes on to a newer run as soon as there is one. Beyond loopback, the URL
    holds a token, without which nothing is shown.
    """
    from collapipe_flwr.core.errors import wrong_input
    from collapipe_flwr.core.processes import stopping
    from collapipe_flwr.reporting.live.feed import Feed
    from collapipe_flwr.reporting.live.finding import run_finder
    from collapipe_flwr.reporting.live.server import Bind, LiveServer

    with wrong_input():
        feed = Feed(run_finder(run, output_dir))
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
