"""``collapipe cluster``: make, keep and check clusters of machines."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from collapipe_flwr.core.errors import ConfigError, prefix_errors
from collapipe_flwr.core.json_codec import to_json, to_plain
from collapipe_flwr.core.keys import check as check_value
from collapipe_flwr.core.links import add_port, split_address
from collapipe_flwr.membership.systemd import (
    Manager,
    Service,
    check_manager,
    enable_lingering,
    install,
)

if TYPE_CHECKING:
    from collapipe_flwr.config.cluster_file import ClusterConfig
    from collapipe_flwr.membership.members import ClusterStatus
    from collapipe_flwr.membership.registry import Registry


class TokenRole(StrEnum):
    """What a token is for."""

    device = "device"
    edge = "edge"
    server = "server"
    control_unit = "control-unit"


class Elsewhere(StrEnum):
    """Members on other machines than the one where the cluster is made."""

    edge = "edge"
    server = "server"
    control_unit = "control-unit"


Folder = Annotated[
    Path | None,
    Option(
        help="Folder of the cluster's files. Default: $COLLAPIPE_FOLDER, else /etc/collapipe for "
        "root, else ~/.config/collapipe."
    ),
]
Kept = Annotated[
    Path | None,
    Option(
        help="Folder that keeps the cluster. Default: $COLLAPIPE_FOLDER, else the first that keeps "
        "one of ~/.config/collapipe (not for root), /etc/collapipe and, after `collapipe deploy`, "
        "/etc/collapipe/control-unit."
    ),
]
AsService = Annotated[
    Manager | None,
    Option("--service", help="Install and start a systemd service, and return."),
]
Minutes = Annotated[float, Option(help="Minutes for which the token is valid.", min=1, max=525600)]


def init(
    name: Annotated[str, Argument(help="Cluster name.")],
    address: Annotated[
        str,
        Option(help="HOST or HOST:PORT where boards reach this machine. Default: detected."),
    ] = "",
    edge_address: Annotated[
        str, Option(help="HOST:PORT of the edge. Default: this host, port 50061.")
    ] = "",
    elsewhere: Annotated[
        list[Elsewhere] | None,
        Option(help="Members on other machines, which join by a token of their own."),
    ] = None,
    members: Annotated[
        int, Option(help="Number of boards that may join by the printed token.", min=1)
    ] = 8,
    minutes: Minutes = 60.0,
    folder: Folder = None,
    service: AsService = None,
    measure: Annotated[bool, Option(help="Measure this machine for plans.")] = True,
) -> None:
    """Make a cluster; run it on its control unit. Print a token by which boards join.

    Makes a CA, certificates of what is on this machine, and the cluster file. For a cluster that is
    there already, only another token is made: its addresses stay. With --elsewhere control-unit,
    run it on any machine that stays, as that of the first of several clusters.
    """
    from collapipe_flwr.config.cluster_file import MEMBER_NAME, MemberConfig, Role
    from collapipe_flwr.membership.newcomer import PORTS, detect_kind, measure_machine
    from collapipe_flwr.membership.registry import Registry, default_folder

    check_value("NAME", name, MEMBER_NAME)
    asked = address and add_port(address, PORTS[Role.CONTROL_UNIT])
    for option, text in (("--address", asked), ("--edge-address", edge_address)):
        if text:
            with prefix_errors(option):
                split_address(text)
    registry = Registry(folder or default_folder())
    if service is not None:
        check_manager(service, registry.folder)
    if (found := registry.clusters().get(name)) is not None:
        _refuse_other_addresses(found, address, edge_address)
        address = found.joining_address
    at = add_port(address or _find_host(), PORTS[Role.CONTROL_UNIT])
    host = at.rpartition(":")[0]
    unit = MemberConfig(name=f"cu-{name}", address=at, kind=detect_kind() or MemberConfig().kind)
    others = frozenset(Role[each.name.upper()] for each in elsewhere or ())
    with registry.lock():
        config = registry.create(name, unit, edge_address or f"{host}:{PORTS[Role.EDGE]}", others)
    from collapipe_flwr.membership.figures import note_figures, read_figures

    known = read_figures(config).find(config.control_unit.name)
    if measure and not config.joining and known.speed_flop_per_s is None:
        typer.echo("measuring this machine", err=True)
        figures = measure_machine(config.control_unit.name)
        with registry.lock():
            note_figures(config, [figures])
    typer.echo(f"cluster {config.id}: {config.path}")
    _print_token(registry, config, TokenRole.device, members, minutes)
    for role in elsewhere or ():
        _print_token(registry, config, TokenRole(role.value), 1, minutes)
    if service is None:
        option = "" if folder is None else f" --folder {folder}"
        typer.echo(f"then, here: collapipe cluster serve{option}")
    else:
        install_service(service, "cluster", registry.folder)


def serve(
    folder: Kept = None,
    listen: Annotated[
        str, Option(help="HOST:PORT for newcomers. Default: the control unit's address.")
    ] = "",
    announce: Annotated[
        bool, Option("--announce", help="Announce it on the local network by mDNS.")
    ] = False,
    edge: Annotated[bool, Option(help="Also run the edge, if its files are here.")] = True,
    edge_options: Annotated[
        list[str] | None, Argument(help="After --: options of `collapipe edge`.")
    ] = None,
) -> None:
    """Admit new members and send rosters to all, until SIGTERM or Ctrl-C.

    It also passes on connections to devices that dial, and runs the edge if its files are here.
    Run it where the cluster was made. Members keep working without it and get changes when it is
    back. On a control unit that joined by a token, it keeps the cluster file up to date.
    """
    import logging

    from collapipe_flwr.membership.serving import serve as stay

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    stay(
        _open_kept(folder),
        lambda text: typer.echo(text),
        listen=listen,
        edge=edge,
        edge_options=edge_options or (),
        announce=announce,
    )


def token(
    cluster: Annotated[str, Argument(help="Cluster name, if there are several here.")] = "",
    role: Annotated[TokenRole, Option(help="Role granted by the token.")] = (TokenRole.device),
    members: Annotated[int, Option(help="Number of members that may join by it.", min=1)] = 1,
    minutes: Minutes = 60.0,
    folder: Kept = None,
) -> None:
    """Print another token; run it where the cluster was made."""
    registry = _open_kept(folder, cluster)
    _print_token(registry, registry.cluster(cluster), role, members, minutes)


def status(
    cluster: Annotated[str, Argument(help="Cluster name, if there are several here.")] = "",
    folder: Kept = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON, once.")] = False,
    once: Annotated[bool, Option("--once", help="Print once on a terminal, too.")] = False,
) -> None:
    """Show the members of a cluster and their state; run it where it was made or on a control unit.

    On a terminal, a table that is updated until Ctrl-C; elsewhere, plain lines. Exit code 1 if a
    member is away or does not have the newest roster yet.
    """
    from collapipe_flwr.membership.members import ask_cluster
    from collapipe_flwr.reporting.output import terminal
    from collapipe_flwr.reporting.tables import follow, status_lines, status_table

    registry, console = _open_kept(folder, cluster), terminal()

    def look() -> ClusterStatus:
        registry.void_expired()
        return ask_cluster(registry.cluster(cluster))

    found = look()
    if as_json:
        typer.echo(to_json(found))
    elif not console.is_terminal:
        typer.echo("\n".join(status_lines(found)))
    elif once:
        console.print(status_table(found))
    else:
        found = follow(console, found, look)
    raise typer.Exit(0 if found.complete else 1)


def remove(
    member: Annotated[str, Argument(help="Name of the member.")],
    cluster: Annotated[str, Option(help="Cluster name, if there are several here.")] = "",
    folder: Kept = None,
) -> None:
    """Remove a member that joined by a token; run it where the cluster was made.

    All members that can be reached refuse its certificate from now on and end its calls, and its
    daemon ends. `collapipe cluster serve` tells the others when they are back.
    """
    from collapipe_flwr.membership.members import list_callable, send_rosters

    registry = _open_kept(folder, cluster)
    with registry.lock():
        before = registry.clusters()
        registry.remove(registry.cluster(cluster), member)
        changed = [c for c in registry.clusters().values() if c.version != before[c.id].version]
        rosters = [registry.roster(config) for config in changed]
    faults: dict[str, str] = {}
    for config, roster in zip(changed, rosters, strict=True):
        gone = [each for each in list_callable(before[config.id]) if each.name == member]
        faults |= send_rosters(config, (*list_callable(config), *gone), roster)
        typer.echo(f"{member} is not a member of {config.id} any more")
    for name, fault in faults.items():
        if fault and name != member:
            typer.echo(
                f"{name} cannot be told now; `collapipe cluster serve` will do that ({fault})"
            )


def check(
    file: Annotated[Path, Argument(help="The cluster file (TOML).")],
    json_file: Annotated[
        Path | None, Option("--json", help="Write the figures to this file.")
    ] = None,
    width: Annotated[int, Option(help="Width of the timed block.")] = 256,
    seconds: Annotated[float, Option(help="Seconds to time it.")] = 1.0,
    deadline_s: Annotated[
        float, Option(help="Seconds to wait for a member's answer.", min=0.1)
    ] = 10.0,
    most_links: Annotated[int, Option(help="Number of links to measure; 0: all.", min=0)] = 64,
) -> None:
    """Reach every member and measure it; run it on the control unit.

    Print speed, free memory, clock, rate and delay of the links, and what to fix. Exit code 1 if
    something needs fixing. To make plans use the figures, those of links included, name the --json
    file as `measured` in the cluster file. A member that trains is not measured, because that would
    slow it down; its figures of an earlier check stay.
    """
    from collapipe_flwr.config.cluster_file import read_cluster
    from collapipe_flwr.pipeline.benchmark import BenchmarkRequest
    from collapipe_flwr.reporting.output import prepare, progress, terminal, write_json

    config = read_cluster(file)
    prepare("--json", json_file)
    block = BenchmarkRequest(width=width, seconds=seconds)
    typer.echo(f"measuring cluster {config.id}", err=True)  # libraries take seconds to load
    from collapipe_flwr.cluster.check import (
        CheckSettings,
        add_earlier,
        check_cluster,
        choose_ways,
    )
    from collapipe_flwr.membership.figures import read_figures
    from collapipe_flwr.reporting.tables import show_measurements

    settings = CheckSettings(block=block, deadline_s=deadline_s, most_links=most_links)
    members = len(config.devices) + 1 + sum(bool(edge.address) for edge in config.edge_machines)
    with progress(members + len(choose_ways(config, settings))) as on_done:
        found = check_cluster(config, settings, on_done)
    show_measurements(found, terminal())
    if found.busy and json_file is not None:
        found = add_earlier(found, read_figures(config))
    write_json(json_file, to_plain(found))
    raise typer.Exit(1 if found.faults else 0)


clusters = typer.Typer(help="Make, keep and check clusters of real machines.", no_args_is_help=True)
for command in (init, serve, token, status, remove, check):
    clusters.command()(command)


def _open_kept(folder: Path | None, cluster: str = "") -> Registry:
    from collapipe_flwr.membership.registry import open_registry

    return open_registry(folder, cluster)


def _refuse_other_addresses(known: ClusterConfig, address: str, edge_address: str) -> None:
    """Raise ConfigError where a cluster that is there already was asked to be elsewhere."""
    from collapipe_flwr.config.cluster_file import Role
    from collapipe_flwr.membership.newcomer import PORTS

    at = address and add_port(address, PORTS[Role.CONTROL_UNIT])
    for option, wanted, kept in (
        ("--address", at, known.joining_address),
        ("--edge-address", edge_address, known.edge.address),
    ):
        if wanted not in ("", kept):
            raise ConfigError(
                f"{option} {wanted}: cluster {known.id} is there already, at {kept}, which its "
                f"members know: leave {option} out for another token, or choose another name"
            )


def _find_host() -> str:
    """Find this machine's address for boards; raises ConfigError where none leads to others."""
    from collapipe_flwr.membership.newcomer import find_own_host

    host = find_own_host()
    if host == "127.0.0.1":
        raise ConfigError(
            "no network route shows the address at which boards reach this machine: give --address "
            "HOST (127.0.0.1 if all members are on this machine)"
        )
    return host


def _print_token(
    registry: Registry, config: ClusterConfig, role: TokenRole, members: int, minutes: float
) -> None:
    from collapipe_flwr.config.cluster_file import Role
    from collapipe_flwr.membership.registry import issue_token

    its = Role[role.name.upper()]
    with registry.lock():
        made = issue_token(registry, config, its, members=members, minutes=minutes)
    who = "on the board" if members == 1 else f"on each of up to {members} boards"
    where = who if role is TokenRole.device else f"on the {its.value}'s machine"
    typer.echo(f"{where}, within {minutes:g} minutes:")
    typer.echo(f"collapipe join {made}")


def install_service(
    manager: Manager, unit: str, folder: Path, name: str = "", options: Sequence[str] = ()
) -> None:
    wanted = Service(unit=unit, folder=folder, name=name, options=options)
    path = install(wanted, manager)
    if manager is Manager.system or enable_lingering():
        typer.echo(f"{wanted.service} runs, and starts with this machine: {path}")
    else:
        typer.echo(f"{wanted.service} runs as long as you are logged in: {path}")
        typer.echo("to start it with this machine: sudo loginctl enable-linger $USER")
