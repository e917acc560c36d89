"""The machines of clusters as a TOML file: which to deploy to, as whom, and what to install.

`docs/deploy.md` shows the format: tables of the control unit, of edge and server (left out: on the
control unit's machine) and of the devices. A host in several tables is one machine with several
roles. Several clusters are tables ``[[cluster]]`` with their own control unit and devices; they
share edge and server. `Access` holds for all machines, or for one table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from collapipe_flwr.config import parsing
from collapipe_flwr.config.cluster_file import MEMBER_NAME
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import between, inline, key, matches

CONTROL_UNIT, EDGE, SERVER, DEVICE = "control-unit", "edge", "server", "device"
_CLUSTER = "cluster"
_HOST = matches(  # part of scripts that root executes
    r"([A-Za-z0-9_][A-Za-z0-9_.-]*|\[?[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\]?)?",
    "must be a host name or address",
)
_OPTIONS = matches(r"[^\"\n`$\\]*", "must have no quotes, backslashes or variables")
_PAIR = (  # as Flower reads them
    r"(?!(partition-id|num-partitions|cluster)=)[A-Za-z][\w-]*(\.[\w-]+)*"
    r"=('[^'\"\n`$\\]*'|-?\d+(\.\d+)?|true|false)"
)
_PAIRS = matches(
    rf"({_PAIR}( +|$))*",
    "must be pairs like \"data.train='/srv/own.csv' compute='cpu'\", without partition-id, "
    "num-partitions and cluster, which are set already",
)
_WORD = matches(r"([A-Za-z0-9/._][^\s'\"`$;|<>()\\]*)?", "must be a word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a machine is reached and what it runs; paths are on the machine that deploys.

    A ``wheel`` is installed into an environment of its own, and its requirements from the package
    indexes ``index`` and ``extra_index``, or the page or folder of wheels ``find_links`` (without
    an ``index``: from nowhere else). An existing ``environment`` on the machine is used unchanged.
    """

    user: str = key("", _WORD)  # empty: ssh's choice
    port: int = key(0, between(0, 65535))  # 0: ssh's choice
    python: str = key("", _WORD)  # empty: python3
    wheel: str = key("")
    constraints: str = key("")  # for pip
    index: str = key("", _WORD)
    extra_index: str = key("", _WORD)
    find_links: str = key("", _WORD)
    environment: str = key("", _WORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRole:
    """What a machine does, as the member ``name`` of a ``cluster``; its keys are those of a table.

    Other machines reach it at ``address``, a device that dials through its control unit. All
    clusters share edge and server, which join the first one.
    """

    kind: str = ""
    cluster: str = ""
    name: str = key("", matches(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})?", MEMBER_NAME.says))
    host: str = key("", _HOST)
    address: str = key("", _HOST)  # left out of a table: as ssh
    dial: bool = key(False)  # a device that accepts no connection but ssh
    options: str = key("", _OPTIONS)  # of its daemon
    node_config: str = key("", _PAIRS)  # of a control unit's SuperNode, besides its place
    access: Access = inline(Access())


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One host with all its roles."""

    host: str
    access: Access
    roles: tuple[MachineRole, ...]

    @property
    def name(self) -> str:
        return " + ".join(role.name for role in self.roles)

    @property
    def login(self) -> str:
        """USER@HOST for ssh."""
        return f"{self.access.user}@{self.host}" if self.access.user else self.host

    def role(self, kind: str) -> MachineRole | None:
        return next((role for role in self.roles if role.kind == kind), None)

    @property
    def with_flower(self) -> bool:
        """Whether Flower's programs run here; devices and the edge do not need them."""
        return bool(self.role(CONTROL_UNIT) or self.role(SERVER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All machines of ``clusters``; the first one has the first control unit, and the CA."""

    clusters: tuple[str, ...]
    machines: tuple[Machine, ...]
    ssh_config: Path | None = None

    @property
    def name(self) -> str:
        return "-".join(self.clusters)

    @property
    def registrar(self) -> Machine:
        """The machine on which the clusters are made."""
        return self.machines[0]

    @property
    def control_units(self) -> list[tuple[Machine, MachineRole]]:
        """In the order of the clusters."""
        found = [(m, role) for m in self.machines if (role := m.role(CONTROL_UNIT))]
        return sorted(found, key=lambda pair: self.clusters.index(pair[1].cluster))

    def keeps_ca(self, role: MachineRole) -> bool:
        """Return whether this control unit is the one beside the CA, which need not join."""
        return role.kind == CONTROL_UNIT and role.cluster == self.clusters[0]

    def one(self, kind: str) -> MachineRole:
        """Return the first role of a kind; of an edge or a server, the only one."""
        return next(role for machine in self.machines if (role := machine.role(kind)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Top:
    cluster: str = key("", MEMBER_NAME)
    ssh_config: str = key("")


def read_inventory(path: Path) -> Inventory:
    """Read the inventory in a TOML file; raises ConfigError naming file, key and value."""
    values = parsing.read_toml(path, f"inventory {path}")
    if "id" in values:
        raise ConfigError(
            f"{path} is a cluster file, by its id: name an inventory, which has `cluster` and says "
            "where ssh finds the machines (docs/deploy.md)"
        )
    try:
        return _parse(values, path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"inventory {path}: {error}") from error


def _parse(values: Mapping[str, Any], folder: Path) -> Inventory:
    plain = {k: v for k, v in values.items() if not isinstance(v, dict | list) and k != _CLUSTER}
    shared = {*parsing.flatten_section(_Top(), ""), *parsing.flatten_section(Access(), "")}
    parsing.refuse_unknown(values, {*shared, CONTROL_UNIT, EDGE, SERVER, DEVICE}, "key")
    top = parsing.parse_section(_Top(), "", plain)
    common = parsing.parse_section(Access(), "", plain)
    roles = list(_read_roles(values))
    machines = tuple(_group_machines(roles, common, folder))
    config = folder / top.ssh_config if top.ssh_config else None
    if config is not None and not config.is_file():
        raise ConfigError(f"ssh-config {config} is not there: correct its path")
    clusters = tuple(dict.fromkeys(role.cluster for role in roles))
    return Inventory(clusters=clusters, machines=machines, ssh_config=config)


def _read_roles(values: Mapping[str, Any]) -> Iterable[MachineRole]:
    """Yield the first control unit, then edge and server, which clusters share, then the rest."""
    shared: tuple[str, ...] = (EDGE, SERVER)
    for cluster, prefix, own in _read_clusters(values):
        blank = MachineRole(kind=CONTROL_UNIT, cluster=cluster)
        unit = parsing.parse_table(blank, prefix + CONTROL_UNIT, own.get(CONTROL_UNIT, {}))
        if not unit.host:
            raise ConfigError(f"{prefix}{CONTROL_UNIT}.host is missing: say where ssh finds it")
        yield _set_name(unit, f"cu-{cluster}", prefix + CONTROL_UNIT)
        for kind in shared:
            found = parsing.parse_table(replace(blank, kind=kind), kind, values.get(kind, {}))
            yield _set_name(replace(found, host=found.host or unit.host), kind, kind)
        shared = ()
        yield from _read_devices(own, prefix, replace(blank, kind=DEVICE))


def _set_name(role: MachineRole, name: str, where: str) -> MachineRole:
    if role.name:
        raise ConfigError(f"{where}.name cannot be chosen, only that of a device: leave it out")
    return replace(_check_role(role, where), name=name)


def _check_role(role: MachineRole, where: str) -> MachineRole:
    if role.node_config and role.kind != CONTROL_UNIT:
        raise ConfigError(f"{where}.node-config belongs to {CONTROL_UNIT}, where the SuperNode is")
    if role.dial and (role.kind != DEVICE or role.address):
        what = "it has no address" if role.kind == DEVICE else f"only a {DEVICE} does"
        raise ConfigError(
            f"{where}.dial: a device that dials cannot be reached, so {what}: leave one of them out"
        )
    return role


def _read_clusters(values: Mapping[str, Any]) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    """Yield name, prefix of its keys, and tables of each cluster."""
    several = values.get(_CLUSTER, "")
    if not isinstance(several, list):
        yield parsing.parse_section(_Top(), "", {_CLUSTER: several}).cluster, "", values
        return
    for kind in (CONTROL_UNIT, DEVICE):
        if kind in values:
            raise ConfigError(f"{kind} belongs to a cluster here: write {_CLUSTER}.{kind}")
    seen: set[str] = set()
    for number, own in enumerate(several, start=1):
        prefix = f"{_CLUSTER}[{number}]."
        if not isinstance(own, Mapping):
            raise ConfigError(f"{_CLUSTER}[{number}] must be a table, [[cluster]], got {own!r}")
        parsing.refuse_unknown(own, {"name", CONTROL_UNIT, DEVICE}, f"key of {_CLUSTER}[{number}]")
        name = parsing.parse_section(_Top(), prefix, {f"{prefix}{_CLUSTER}": own.get("name", "")})
        if name.cluster.casefold() in seen:
            raise ConfigError(f"two clusters are called {name.cluster!r}: names must differ")
        seen.add(name.cluster.casefold())
        yield name.cluster, prefix, own
    if not several:
        raise ConfigError("at least one [[cluster]] table is needed")


def _read_devices(
    values: Mapping[str, Any], prefix: str, blank: MachineRole
) -> Iterable[MachineRole]:
    devices = values.get(DEVICE, [])
    if not isinstance(devices, list) or not devices:
        head = f"[[{_CLUSTER}.{DEVICE}]]" if prefix else f"[[{DEVICE}]]"
        raise ConfigError(f"at least one {head} table with a name and a host is needed")
    for number, table in enumerate(devices, start=1):
        where = f"{prefix}{DEVICE}[{number}]"
        device = parsing.parse_table(blank, where, table)
        for what in ("name", "host"):
            if not getattr(device, what):
                raise ConfigError(f"{where}.{what} is missing")
        yield _check_role(device, where)


def _group_machines(roles: list[MachineRole], common: Access, folder: Path) -> Iterable[Machine]:
    names = [role.name.casefold() for role in roles]
    twice = [role.name for role in roles if names.count(role.name.casefold()) > 1]
    if twice:
        raise ConfigError(f"two members are called {twice[0]!r}: names must differ")
    for host in dict.fromkeys(role.host for role in roles):
        here = [role for role in roles if role.host == host]
        for kind, what in ((DEVICE, "device"), (CONTROL_UNIT, "control unit")):
            if sum(role.kind == kind for role in here) > 1:
                raise ConfigError(f"two {what}s are on host {host!r}: a machine can be one {what}")
        address = here[0].address or host
        yield Machine(
            host=host,
            access=_merge_access(here, common, folder),
            roles=tuple(replace(role, address=role.address or address) for role in here),
        )


def _merge_access(roles: list[MachineRole], common: Access, folder: Path) -> Access:
    """Take each setting from the first of a machine's tables that has it, else the common one."""
    own = [role.access for role in roles]
    found = {f.name: [getattr(each, f.name) for each in (*own, common)] for f in fields(Access)}
    access = Access(**{name: next(filter(None, said), said[-1]) for name, said in found.items()})
    if any(each.wheel for each in own) and not any(each.environment for each in own):
        access = replace(access, environment="")
    if access.environment:
        return replace(access, wheel="", constraints="")
    if not access.wheel:
        raise ConfigError(
            f"host {roles[0].host!r} has neither a wheel nor an environment: build a wheel by "
            "`pip wheel --no-deps .` in the sources and name it, or an environment that is there"
        )
    return replace(
        access,
        wheel=_find_file("wheel", access.wheel, folder),
        constraints=_find_file("constraints", access.constraints, folder),
    )


def _find_file(what: str, name: str, folder: Path) -> str:
    path = folder / name
    if name and not path.is_file():
        raise ConfigError(f"{what} {path} is not there: correct its path, or make the file")
    return str(path) if name else ""
