"""``collapipe certs``: a private CA and a certificate for every member of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    from collapipe_flwr.config.access_control import roster_of
    from collapipe_flwr.config.cluster_file import certificate_hosts, read_cluster
    from collapipe_flwr.core.errors import ConfigError
    from collapipe_flwr.transport.certificates import sign_all

    clusters = [read_cluster(path) for path in cluster or ()]
    roster_of(clusters)  # refuses a name that two clusters would share
    members = certificate_hosts(clusters)
    for text in names or ():
        name, _, host = text.partition("=")
        members[name] = (*members.get(name, ()), *([host] if host else []))
    if not members:
        raise ConfigError("nobody to sign for: name members, or a cluster file with --cluster")
    made = sign_all(folder, members, days=days, renew=renew, new_ca=new_ca)
    for name in members:
        typer.echo(f"{name}: {folder / name}.pem, .key" if name in made else f"{name}: kept")
