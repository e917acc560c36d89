"""``collapipe cluster`` and ``collapipe certs``: look after a cluster of real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from collapipe_flwr.cli.joining import init, remove, serve, status, token

clusters = typer.Typer(help="Make, keep and check clusters of real machines.", no_args_is_help=True)
for command in (init, serve, token, status, remove):
    clusters.command()(command)


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
    from collapipe_flwr.reporting.cost_tables import show_measurements
    from collapipe_flwr.reporting.output import prepare, progress, write_json

    config = read_cluster(file)
    prepare("--json", json_file)
    block = BenchmarkRequest(width=width, seconds=seconds)
    settings = CheckSettings(block=block, deadline_s=deadline_s, most_links=most_links)
    members = len(config.devices) + 1 + bool(config.edge.address)
    with progress(members + len(measured_ways(config, settings))) as on_done:
        found = check_cluster(config, settings, on_done)
    show_measurements(found, Console())
    write_json(json_file, plain(found))
    raise typer.Exit(1 if found.faults else 0)


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the PEM files.")],
    names: Annotated[
        list[str] | None,
        typer.Argument(help="NAME or NAME=HOST of members without a cluster file."),
    ] = None,
    cluster: Annotated[list[Path] | None, typer.Option(help="Cluster files (TOML).")] = None,
    days: Annotated[int, typer.Option(help="Validity in days.", min=1)] = 825,
    renew: Annotated[bool, typer.Option(help="Replace these members' certificates.")] = False,
    new_ca: Annotated[
        bool, typer.Option("--new-ca", help="Replace the CA, which invalidates all certificates.")
    ] = False,
) -> None:
    """Create a CA and sign a certificate for every member that has none.

    Give every member `ca.pem`, its own NAME.pem and its own NAME.key. Keep `ca.key` here: anyone
    who has it can sign members.
    """
    from collapipe_flwr.config.access_control import access_control
    from collapipe_flwr.config.cluster_file import certificate_hosts, read_cluster
    from collapipe_flwr.core.errors import ConfigError
    from collapipe_flwr.transport.certificates import sign_all

    clusters = [read_cluster(path) for path in cluster or ()]
    access_control(clusters)  # refuses a name that two clusters would share
    members = certificate_hosts(clusters)
    for text in names or ():
        name, _, host = text.partition("=")
        members[name] = (*members.get(name, ()), *([host] if host else []))
    if not members:
        raise ConfigError("nobody to sign for: name members, or a cluster file with --cluster")
    made = sign_all(folder, members, days=days, renew=renew, new_ca=new_ca)
    for name in members:
        typer.echo(f"{name}: {folder / name}.pem, .key" if name in made else f"{name}: kept")
