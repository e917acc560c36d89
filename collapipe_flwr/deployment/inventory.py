"""The machines of one cluster as a TOML file: which to deploy to, as whom, and what to install.

    cluster = "greenhouse"
    wheel = "collapipe_flwr-0.1.0-py3-none-any.whl"   # beside this file
    user = "pi"                 # such keys hold for all machines; a table may have its own

    [control-unit]
    host = "10.0.0.10"          # as ssh and the other machines know it

    [edge]                      # left out: on the control unit, as [server]
    host = "10.0.0.2"

    [[device]]
    name = "pi-1"
    host = "10.0.0.11"

Machines that several tables name are one machine with several roles.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from collapipe_flwr.config.cluster_file import MEMBER_NAME
from collapipe_flwr.config.parsing import flatten_section, parse_section, refuse_unknown
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import between, inline, key, matches

T = TypeVar("T")
CONTROL_UNIT, EDGE, SERVER, DEVICE = "control-unit", "edge", "server", "device"
_HOST = matches(r"([A-Za-z0-9_\[][^\s/@'\"]*)?", "must be a host name or address")
_OPTIONS = matches(r"[^\"\n`$\\]*", "must have no quotes, backslashes or variables")
_WORD = matches(r"([A-Za-z0-9/._][^\s'\"]*)?", "must be a word")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How a machine is reached and what it runs; paths of wheels and ssh are on this machine.

    A ``wheel`` is installed into an environment of its own, what it needs from the package index
    ``index`` if there is one, and from ``extra_index``; an ``environment`` that is on the machine
    already is taken as it is.
    """

    user: str = key("", _WORD)  # empty: ssh's choice
    port: int = key(0, between(0, 65535))  # 0: ssh's choice
    python: str = key("", _WORD)  # empty: python3
    wheel: str = key("")
    constraints: str = key("")  # for pip
    index: str = key("", _WORD)
    extra_index: str = key("", _WORD)
    environment: str = key("", _WORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A role's table, or one of a device; ``address`` is how other machines reach it."""

    name: str = key("", matches(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62})?", MEMBER_NAME.says))
    host: str = key("", _HOST)
    address: str = key("", _HOST)  # empty: as ssh
    options: str = key("", _OPTIONS)  # of its daemon
    access: Access = inline(Access())


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a machine does, under which ``name`` in the cluster, where others reach it."""

    kind: str
    name: str
    address: str
    options: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that one host does."""

    host: str
    access: Access
    roles: tuple[Role, ...]

    @property
    def name(self) -> str:
        """How its results are called."""
        return " + ".join(role.name for role in self.roles)

    def role(self, kind: str) -> Role | None:
        """Its role of that kind."""
        return next((role for role in self.roles if role.kind == kind), None)

    @property
    def with_flower(self) -> bool:
        """Whether Flower's programs run here, which devices and the edge do without."""
        return bool(self.role(CONTROL_UNIT) or self.role(SERVER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All machines of ``cluster``; the first one is the control unit's."""

    cluster: str
    machines: tuple[Machine, ...]
    ssh_config: Path | None = None

    @property
    def control_unit(self) -> Machine:
        """The machine of the control unit."""
        return self.machines[0]

    def one(self, kind: str) -> Role:
        """The role that only one machine has."""
        return next(role for machine in self.machines if (role := machine.role(kind)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Top:
    cluster: str = key("", MEMBER_NAME)
    ssh_config: str = key("")


def read_inventory(path: Path) -> Inventory:
    """The inventory in a TOML file; raises ConfigError that names file, key and value."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"inventory {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"inventory {path} is not TOML: {error}") from error
    try:
        return _parsed(values, path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"inventory {path}: {error}") from error


def _parsed(values: Mapping[str, Any], folder: Path) -> Inventory:
    plain = {k: v for k, v in values.items() if not isinstance(v, dict | list)}
    shared = {*flatten_section(_Top(), ""), *flatten_section(Access(), "")}
    refuse_unknown(values, {*shared, CONTROL_UNIT, EDGE, SERVER, DEVICE}, "key")
    top = parse_section(_Top(cluster=""), "", {"cluster": "", **plain})
    common = parse_section(Access(), "", plain)
    tables = list(_tables(values, top.cluster))
    machines = tuple(_machines(tables, common, folder))
    config = folder / top.ssh_config if top.ssh_config else None
    if config is not None and not config.is_file():
        raise ConfigError(f"ssh-config {config} is not there")
    return Inventory(cluster=top.cluster, machines=machines, ssh_config=config)


def _tables(values: Mapping[str, Any], cluster: str) -> Iterable[tuple[str, Table]]:
    unit = _table(CONTROL_UNIT, values.get(CONTROL_UNIT, {}), Table(name=f"cu-{cluster}"))
    if not unit.host:
        raise ConfigError("control-unit.host is missing: say where ssh finds it")
    yield CONTROL_UNIT, replace(unit, name=f"cu-{cluster}")
    for kind in (EDGE, SERVER):
        found = _table(kind, values.get(kind, {}), Table())
        yield kind, replace(found, name=kind, host=found.host or unit.host)
    devices = values.get(DEVICE, [])
    if not isinstance(devices, list) or not devices:
        raise ConfigError("at least one [[device]] table with a name and a host is needed")
    for number, table in enumerate(devices, start=1):
        device = _table(f"{DEVICE}[{number}]", table, Table())
        for what in ("name", "host"):
            if not getattr(device, what):
                raise ConfigError(f"device[{number}].{what} is missing")
        yield DEVICE, device


def _table(name: str, values: object, default: Table) -> Table:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name} must be a table, [{name}], got {values!r}")
    prefix = f"{name}."
    named = {prefix + k: value for k, value in values.items()}
    refuse_unknown(named, flatten_section(default, prefix), "key")
    return parse_section(default, prefix, named)


def _machines(tables: list[tuple[str, Table]], common: Access, folder: Path) -> Iterable[Machine]:
    names = [table.name.casefold() for _, table in tables]
    twice = [table.name for _, table in tables if names.count(table.name.casefold()) > 1]
    if twice:
        raise ConfigError(f"two members are called {twice[0]!r}: names must differ")
    for host in dict.fromkeys(table.host for _, table in tables):
        here = [(kind, table) for kind, table in tables if table.host == host]
        if sum(kind == DEVICE for kind, _ in here) > 1:
            raise ConfigError(f"two devices are on host {host!r}: a machine can be one device")
        yield Machine(
            host=host,
            access=_access([table for _, table in here], common, folder),
            roles=tuple(
                Role(
                    kind=kind,
                    name=table.name,
                    address=table.address or here[0][1].address or host,
                    options=table.options,
                )
                for kind, table in here
            ),
        )


def _access(tables: list[Table], common: Access, folder: Path) -> Access:
    """What the first of a machine's tables says that says something, else what holds for all."""
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(Access)):
        said = [value for table in tables if (value := getattr(table.access, name))]
        found[name] = said[0] if said else getattr(common, name)
    access = Access(**found)
    own = [table.access for table in tables]
    if any(each.wheel for each in own) and not any(each.environment for each in own):
        access = replace(access, environment="")
    if access.environment:
        return replace(access, wheel="", constraints="")
    if not access.wheel:
        raise ConfigError(
            f"host {tables[0].host!r} has neither a wheel nor an environment: build a wheel by "
            "`pip wheel --no-deps .` in the sources and name it, or an environment that is there"
        )
    return replace(
        access,
        wheel=_found("wheel", access.wheel, folder),
        constraints=_found("constraints", access.constraints, folder),
    )


def _found(what: str, name: str, folder: Path) -> str:
    path = folder / name
    if name and not path.is_file():
        raise ConfigError(f"{what} {path} is not there")
    return str(path) if name else ""
