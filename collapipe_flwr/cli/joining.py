"""``collapipe join``, ``deploy`` and ``certs``: machines become members of a cluster."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from collapipe_flwr.cli.cluster import AsService, Folder, install_service
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.membership.systemd import check_manager

if TYPE_CHECKING:
    from collapipe_flwr.cluster.profile import Measured
    from collapipe_flwr.deployment.ssh import Result
    from collapipe_flwr.membership.newcomer import Membership, Newcomer
    from collapipe_flwr.membership.tokens import JoinToken


def join(
    token: Annotated[str, Argument(help="The token; - reads it from standard input.")],
    name: Annotated[str, Option(help="Name in the cluster. Default: the host name.")] = "",
    address: Annotated[
        str,
        Option(
            help="HOST:PORT where its daemon listens. Default: how this machine reaches the "
            "control unit, port 50071 (an edge: 50061)."
        ),
    ] = "",
    dial: Annotated[
        bool,
        Option(
            "--dial",
            help="Accept no connections; dial the control unit instead.",
        ),
    ] = False,
    kind: Annotated[str, Option(help="Board preset. Default: detected from the device tree.")] = "",
    folder: Folder = None,
    service: AsService = None,
    start: Annotated[bool, Option(help="Run its daemon after joining, until SIGTERM.")] = True,
    discover: Annotated[
        bool,
        Option("--discover", help="Look for the control unit by mDNS, not at its address."),
    ] = False,
    again: Annotated[
        bool, Option("--again", help="Join anew with another key, as after a removal.")
    ] = False,
    options: Annotated[list[str] | None, Argument(help="After --: options of the daemon.")] = None,
) -> None:
    """Join a cluster by a token, and run the member's daemon.

    The board makes its own key, which never leaves it, measures its speed, and gets its certificate
    and the cluster file. A board that has joined just starts its daemon.
    """
    from collapipe_flwr.membership import newcomer as here
    from collapipe_flwr.membership.registry import default_folder
    from collapipe_flwr.membership.tokens import parse_token

    folder = folder or default_folder()
    if service is not None:
        check_manager(service, folder)
    if dial and address:
        raise ConfigError(
            "--dial and --address: a device that dials has no address, so leave one out"
        )
    known = parse_token(_read_token() if token == "-" else token)
    newcomer = here.Newcomer(
        folder=folder,
        name=name or here.choose_name(known.role, known.cluster_id),
        address=address,
        dials=dial,
        kind=kind or here.detect_kind(),
    )
    if again:
        here.forget(newcomer)
    found = here.find_membership(newcomer, known.pin)
    if found is None:
        found = _join(known, newcomer, discover)
        typer.echo(f"{found.name} joined {found.cluster.id} as {found.role.value}")
    else:
        typer.echo(f"{found.name} is in {found.cluster.id} already, as {found.role.value}")
    unit = {"device": "device", "edge": "edge", "control unit": "cluster"}.get(found.role.value)
    if service is not None and unit is not None:
        install_service(service, unit, newcomer.folder, found.name, options or ())
    elif start:
        _start(found, newcomer.folder, options or [])


def _read_token() -> str:
    if sys.stdin is None:  # closed
        return ""
    if sys.stdin.isatty():
        typer.echo("token: ", nl=False, err=True)
    try:
        return sys.stdin.readline()
    except UnicodeDecodeError:
        return "?"


def _join(token: JoinToken, newcomer: Newcomer, discover: bool) -> Membership:
    from collapipe_flwr.config.cluster_file import Role
    from collapipe_flwr.core.links import add_port, find_own_address
    from collapipe_flwr.membership import newcomer as here

    unit = token.address
    if discover:
        from collapipe_flwr.membership.discovery import find_control_unit

        unit = find_control_unit(token.pin, interface=unit.rpartition(":")[0])
    address = ""
    if not newcomer.dials:
        address = add_port(newcomer.address or find_own_address(unit), here.PORTS[token.role])
    measures = token.role in (Role.DEVICE, Role.CONTROL_UNIT)

    def say(text: str) -> None:
        typer.echo(text, err=True)

    def measure(name: str) -> Measured:
        say("measuring this machine")
        return here.measure_machine(name)

    return here.join(
        token,
        replace(newcomer, address=address),
        measure if measures else None,
        address=unit,
        patience_s=here.PATIENCE_S,
        say=say,
    )


def _start(found: Membership, folder: Path, options: list[str]) -> None:
    """Replace this process by the daemon, without the libraries that measured."""
    from collapipe_flwr.config.cluster_file import Role

    path = found.cluster.path
    assert path is not None
    if found.role is Role.SERVER:
        typer.echo(f"its files are in {folder}: {path.name}, certs/{found.name}.pem and .key")
        return
    command = [found.role.value, "--cluster", str(path), "--name", found.name]
    if found.role is Role.CONTROL_UNIT:
        typer.echo(f"to train: collapipe run . --cluster {path}")
        command = ["cluster", "serve", "--folder", str(folder)]
    sys.stdout.flush()
    python = [sys.executable, "-m", "collapipe_flwr.cli"]
    os.execv(sys.executable, [*python, *command, *options])


def deploy(
    inventory: Annotated[Path, Argument(help="The machines and their roles (TOML).")],
    dry_run: Annotated[
        bool, Option("--dry-run", help="Look at the machines and print what would be done.")
    ] = False,
    accept_new: Annotated[
        bool,
        Option("--accept-new", help="Accept host keys of machines that ssh does not know yet."),
    ] = False,
    deadline_s: Annotated[
        float, Option(help="Seconds for each phase on a machine.", min=1)
    ] = 1800.0,
) -> None:
    """Install, join, start services and check, on all machines over ssh.

    Steps that are done already are skipped, so deploy again after a failure, or with more machines.
    Exit code 1 if something needs fixing.
    """
    from collapipe_flwr.deployment.deploy import Deployment, show, show_next_steps
    from collapipe_flwr.deployment.inventory import read_inventory
    from collapipe_flwr.deployment.ssh import Outcome
    from collapipe_flwr.reporting.output import terminal

    console = terminal()

    def show_step(result: Result) -> None:
        if result.outcome is not Outcome.KEPT:
            line = f"{result.machine}: {result.outcome.value} {result.step}"
            console.print(line, soft_wrap=True)

    deployed = Deployment(
        inventory=read_inventory(inventory),
        dry=dry_run,
        accept_new=accept_new,
        deadline_s=deadline_s,
        on_result=show_step,
    )
    deployed.run()
    show(deployed, console)
    if not dry_run and not deployed.failures:
        show_next_steps(deployed, inventory, console)
    needs_fixing = deployed.failures or any(check.faults for check in deployed.checks)
    raise typer.Exit(1 if needs_fixing else 0)


def certs(
    folder: Annotated[Path, Argument(help="Folder for the PEM files.")],
    names: Annotated[
        list[str] | None,
        Argument(help="NAME or NAME=HOST of members without a cluster file."),
    ] = None,
    cluster: Annotated[list[Path] | None, Option(help="Cluster files (TOML).")] = None,
    days: Annotated[int, Option(help="Validity in days.", min=1, max=36500)] = 825,
    renew: Annotated[bool, Option(help="Replace these members' certificates.")] = False,
    new_ca: Annotated[
        bool, Option("--new-ca", help="Replace the CA, which invalidates all certificates.")
    ] = False,
) -> None:
    """Create a CA and sign a certificate for every member that has none.

    Give every member `ca.pem`, its own NAME.pem and its own NAME.key. Keep `ca.key` here: anyone
    who has it can sign members.
    """
    from collapipe_flwr.config.access_control import access_control
    from collapipe_flwr.config.cluster_file import list_certificate_hosts, read_cluster
    from collapipe_flwr.transport.certificates import sign_all

    clusters = [read_cluster(path) for path in cluster or ()]
    access_control(clusters)  # refuses a name that two clusters would share
    members = list_certificate_hosts(clusters)
    for text in names or ():
        name, equals, host = text.partition("=")
        if equals and not host:
            raise ConfigError(f"{text} has no host: write {text}HOST, or {name} alone")
        members[name] = (*members.get(name, ()), *([host] if host else []))
    if not members:
        raise ConfigError(
            "there are no members to sign for: name some, or a cluster file with --cluster"
        )
    made = sign_all(folder, members, days=days, renew=renew, new_ca=new_ca)
    for name in members:
        typer.echo(f"{name}: {folder / name}.pem, .key" if name in made else f"{name}: kept")
