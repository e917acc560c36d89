"""``collapipe cluster``: look after a cluster of real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

clusters = typer.Typer(help="Check a cluster of real machines.", no_args_is_help=True)


@clusters.callback()
def _keep_subcommands() -> None:
    """Check a cluster of real machines."""


@clusters.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The cluster file (TOML).")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    width: Annotated[int, typer.Option(help="Width of the timed block.")] = 256,
    seconds: Annotated[float, typer.Option(help="Seconds to time it.")] = 1.0,
    deadline_s: Annotated[
        float, typer.Option(help="Seconds to wait for a member's answer.", min=0.1)
    ] = 10.0,
    most_links: Annotated[
        int, typer.Option(help="Number of links to measure; 0: all.", min=0)
    ] = 64,
) -> None:
    """Reach every member and measure it; run it on the control unit.

    Print speed, free memory, clock, rate and delay of the links, and what to fix. Exit code 1 if
    something needs fixing. To make plans use the figures, name the --json file as `measured` in the
    cluster file.
    """
    from rich.console import Console

    from collapipe_flwr.cluster.check import CheckSettings, check_cluster, measured_ways
    from collapipe_flwr.config.cluster_file import read_cluster
    from collapipe_flwr.core.json_codec import plain
    from collapipe_flwr.pipeline.benchmark import BenchmarkRequest
    from collapipe_flwr.reporting.cluster_table import show_measurements
    from collapipe_flwr.reporting.output import prepare, progress, write_json

    config = read_cluster(file)
    if json_file is not None:
        prepare("--json", json_file)
    block = BenchmarkRequest(width=width, seconds=seconds)
    settings = CheckSettings(block=block, deadline_s=deadline_s, most_links=most_links)
    members = len(config.devices) + 1 + bool(config.edge.address)
    with progress(members + len(measured_ways(config, settings))) as on_done:
        found = check_cluster(config, settings, on_done)
    show_measurements(found, Console())
    if json_file is not None:
        write_json(json_file, plain(found))
    raise typer.Exit(1 if found.faults else 0)
