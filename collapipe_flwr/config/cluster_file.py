"""One cluster of real machines as a TOML file: its members, where they are, and their figures.

`docs/reference/cluster-file.md` shows every key. All members have the same file, and paths are
relative to it. Megabytes, gigaflops and megabits end here: the rest of the package counts in bytes,
operations, bits and seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from collapipe_flwr.config.parsing import (
    flatten_section,
    parse_table,
    read_toml,
    refuse_unknown,
)
from collapipe_flwr.config.privacy import NO_DEMANDS, PrivacyConfig
from collapipe_flwr.core import bounds
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import Rule, Value, above, at_least, key, matches, one_of, path
from collapipe_flwr.core.links import CODECS, TlsFiles, is_address

MEMBER_NAME = bounds.MEMBER_NAME
RELAY_PORT = 50062  # of control units, for devices that dial
_FINGERPRINT = matches(r"([0-9a-f]{64})?", "must be a SHA-256, 64 hexadecimal digits")
_ADDRESS = Rule(lambda text: not text or is_address(text), 'must read like "10.0.0.11:50071"')
LORA_RANK = Rule(
    lambda v: v is None or v >= 1,
    "must be a whole number of at least 1, or left out for the run's lora.rank",
    read=lambda text: int(text) if text else None,
    write=lambda v: str(v or ""),
)
_HEAD = """\
# Kept by `collapipe cluster` where it was made, and written anew when a member joins or is removed.
# Figures, [links] and [privacy] may be edited there; comments are lost.
"""


class Role(Enum):
    """What a member is in its cluster."""

    CONTROL_UNIT = "control unit"
    DEVICE = "device"
    EDGE = "edge"
    SERVER = "server"
    REGISTRAR = "registrar"

    @property
    def word(self) -> str:
        """Its name in options, tokens and inventories."""
        return self.value.replace(" ", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """A machine. A figure of 0 was not declared: measured, or that of its ``kind``, counts.

    A device that ``dials`` accepts no connection: it is reached where its control unit relays.
    """

    name: str = key("", MEMBER_NAME)
    address: str = key("", _ADDRESS)
    dials: bool = key(False)
    kind: str = key("raspberry-pi-4")
    speed_gflop_per_s: float = key(0.0, at_least(0))  # effective, in training
    memory_mb: float = key(0.0, at_least(0))  # that training may use
    energy_per_gflop_j: float = key(0.0, at_least(0))
    tx_power_w: float = key(0.0, at_least(0))
    fingerprint: str = key("", _FINGERPRINT)  # of the certificate that it may show
    earlier_fingerprint: str = key("", _FINGERPRINT)  # of the one before, until that ends
    trusted: bool = key(False)  # may hold the blocks that a run keeps on trusted devices

    @property
    def fingerprints(self) -> frozenset[str]:
        """Those of its certificates; empty: any that the CA signed, or it has not joined."""
        return frozenset(filter(None, (self.fingerprint, self.earlier_fingerprint)))

    @property
    def host(self) -> str:
        """The host in its address; empty without an address."""
        return self.address.rpartition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLinks:
    """What the planner assumes of the cluster's links."""

    bandwidth_mhz: float = key(20.0, above(0))  # of each hop between devices
    server_mbit_per_s: float = key(100.0, above(0))  # control unit to the Flower server
    rate_mbit_per_s: float = key(0.0, at_least(0))  # most that senders use; 0: as fast as it goes
    codec: str = key("", one_of("", *CODECS))  # empty: the run's choice


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files; ``{name}`` stands for the member that reads the file."""

    ca: str = key("certs/ca.pem")
    certificate: str = key("certs/{name}.pem")
    private_key: str = key("certs/{name}.key", name="key")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The whole file; ``tls`` is None where links are plain text.

    A file with a ``version`` above 0 is a roster, kept by `collapipe cluster`: members replace it
    by newer ones, and a member without a fingerprint has not joined yet. Newcomers are admitted at
    ``joining``, or by the control unit's machine if that is empty; devices that dial are reached at
    ``relay``, or at a port of that machine.
    """

    id: str = key("", MEMBER_NAME)
    version: int = key(0, at_least(0))
    joining: str = key("", _ADDRESS)
    relay: str = key("", _ADDRESS)
    measured: Path | None = key(None, path())
    lora_rank: int | None = key(None, LORA_RANK)  # of its adapters; None: the run's
    folder: Path = Path()
    control_unit: MemberConfig = MemberConfig(name="control-unit")
    devices: tuple[MemberConfig, ...] = ()
    edge: MemberConfig = MemberConfig(name="edge")
    other_edges: tuple[MemberConfig, ...] = ()  # where [[edge]] is repeated
    server: MemberConfig = MemberConfig(name="server")
    links: ClusterLinks = ClusterLinks()
    privacy: PrivacyConfig = NO_DEMANDS  # which its control unit breaks for no server
    tls: TlsConfig | None = None
    path: Path | None = None  # where it was read

    @property
    def roles(self) -> tuple[tuple[MemberConfig, Role], ...]:
        """All members with a certificate, each with its role."""
        return (
            (self.control_unit, Role.CONTROL_UNIT),
            *((device, Role.DEVICE) for device in self.devices),
            *((edge, Role.EDGE) for edge in self.edge_machines),
            (self.server, Role.SERVER),
        )

    @property
    def edges(self) -> tuple[MemberConfig, ...]:
        """The edges to choose from, in order of preference."""
        return (self.edge, *self.other_edges)

    @property
    def used_edges(self) -> tuple[MemberConfig, ...]:
        """Of these, the edges that may serve: the control unit alone where labels stay there."""
        return (self.control_unit,) if self.privacy.labels_at_home else self.edges

    @property
    def edge_machines(self) -> tuple[MemberConfig, ...]:
        """The edges that are neither the control unit nor a device."""
        others = {self.control_unit.name, *(device.name for device in self.devices)}
        return tuple(edge for edge in self.edges if edge.name not in others)

    @property
    def edge_is_control_unit(self) -> bool:
        """Whether the control unit is the preferred edge, which it serves while it trains."""
        return self.used_edges[0].name == self.control_unit.name

    @property
    def members(self) -> tuple[MemberConfig, ...]:
        """All members with a certificate."""
        return tuple(member for member, _ in self.roles)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that may talk to a member."""
        return tuple(member.name for member in self.members)

    @property
    def joining_address(self) -> str:
        """Where newcomers are admitted; empty if they are not."""
        return self.joining or self.control_unit.address

    @property
    def relay_address(self) -> str:
        """Where devices that dial are reached; empty where nothing says where the machine is."""
        host = self.control_unit.host
        return self.relay or (f"{host}:{RELAY_PORT}" if host else "")

    @property
    def diallers(self) -> tuple[MemberConfig, ...]:
        """The devices that dial."""
        return tuple(device for device in self.devices if device.dials)

    def list_in_role(self, role: Role) -> tuple[MemberConfig, ...]:
        """Return the members in a role: any number of devices, at most one of every other."""
        return tuple(member for member, its in self.roles if its is role)

    def has_joined(self, name: str) -> bool:
        """Return whether it is a member; of a roster, one who has a certificate."""
        return any(m.name == name and (m.fingerprint or not self.version) for m in self.members)

    def device_id(self, member: MemberConfig) -> str:
        """Return a device's name in plans and reports."""
        return f"{self.id}/{member.name}"

    def certificate_name(self, member: MemberConfig) -> str:
        """Return what a member must prove under TLS; empty on plain text."""
        return member.name if self.tls else ""

    def member(self, name: str) -> MemberConfig:
        """Return the member of that name; raises ConfigError with the names there are."""
        found = next((m for m in self.members if m.name == name), None)
        if found is None:
            raise ConfigError(
                f"cluster {self.id} has no member {name!r}: choose one of {', '.join(self.names)}"
            )
        return found

    def tls_files(self, name: str) -> TlsFiles | None:
        """Return the PEM files of the member of that name."""
        if self.tls is None:
            return None
        ca, certificate, private = (
            self.folder / text.replace("{name}", name)
            for text in (self.tls.ca, self.tls.certificate, self.tls.private_key)
        )
        return TlsFiles(ca=ca, certificate=certificate, key=private)


_USUAL = ClusterConfig()
_TABLES = {
    "control-unit": "control_unit",
    "edge": "edge",
    "server": "server",
    "links": "links",
    "privacy": "privacy",
}


def read_cluster(path: Path) -> ClusterConfig:
    """Read the cluster in a TOML file; raises ConfigError naming file, key and value."""
    values = read_toml(path, f"cluster file {path}")
    if "cluster" in values:
        raise ConfigError(
            f"{path} is an inventory of `collapipe deploy`, by its key cluster: name the file of "
            "the cluster, which `collapipe cluster` keeps on the control unit"
        )
    try:
        return replace(parse_cluster(values, path.resolve().parent), path=path)
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error}") from error


def read_clusters(folder: Path, member: str) -> list[ClusterConfig]:
    """Read the cluster files of a folder that list this member; raises ConfigError without any."""
    found = [read_cluster(path) for path in sorted(folder.glob("*.toml"))]
    listing = [config for config in found if member in config.names]
    if not listing:
        raise ConfigError(f"no cluster file in {folder} lists a member {member!r}")
    return listing


def parse_cluster(values: Mapping[str, Any], folder: Path) -> ClusterConfig:
    """Build a cluster from the tables of its file; raises ConfigError."""
    plain = set(flatten_section(_USUAL, ""))
    refuse_unknown(values, {*plain, "device", *_TABLES, "tls"}, "key")
    config = parse_table(_USUAL, "", {k: v for k, v in values.items() if k in plain})
    devices = values.get("device", ())
    are_tables = isinstance(devices, Sequence) and all(isinstance(d, Mapping) for d in devices[:1])
    if not are_tables or not (devices or config.version):
        raise ConfigError("at least one [[device]] table with a name and an address is needed")
    edges = values.get("edge", {})
    first, *others = edges if isinstance(edges, list) and edges else [edges]
    values = {**values, "edge": first}
    tables: dict[str, Any] = {
        field: parse_table(getattr(_USUAL, field), name, values.get(name, {}))
        for name, field in _TABLES.items()
    }
    config = replace(
        config,
        folder=folder,
        measured=config.measured and folder / config.measured,
        devices=tuple(
            parse_table(MemberConfig(), f"device[{i}]", table) for i, table in enumerate(devices, 1)
        ),
        tls=parse_table(TlsConfig(), "tls", values["tls"]) if "tls" in values else None,
        other_edges=tuple(
            parse_table(_USUAL.edge, f"edge[{i}]", table) for i, table in enumerate(others, 2)
        ),
        **tables,
    )
    _check_members(config)
    at = config.relay_address
    config = replace(
        config,
        devices=tuple(replace(d, address=at) if d.dials else d for d in config.devices),
    )
    devices = {device.name: device for device in config.devices}
    edge, *others = (devices.get(edge.name, edge) for edge in config.edges)
    return replace(config, edge=edge, other_edges=tuple(others))


def _check_members(config: ClusterConfig) -> None:
    for index, device in enumerate(config.devices, 1):
        _check_way(config, index, device)
    if any(m.dials for m in (config.control_unit, *config.edges, config.server)):
        raise ConfigError("only a device dials: leave dials out of the other tables")
    for names in (config.names, [edge.name for edge in config.edges]):
        compared = [name.casefold() for name in names]  # hosts and some disks ignore case
        twice = [name for name in names if compared.count(name.casefold()) > 1]
        if twice:
            raise ConfigError(f"two members are called {twice[0]!r}: names must differ")
    edges = {edge.name: edge.address for edge in config.edges}
    for device in config.devices:
        if edges.get(device.name, "") not in ("", device.address):
            raise ConfigError(
                f"edge.address is {edges[device.name]!r}, but [edge] names the device "
                f"{device.name!r} at {device.address!r}: leave edge.address out, or give the edge "
                "a name of its own"
            )
    nowhere = [edge.name for edge in config.edge_machines if not edge.address]
    if config.other_edges and nowhere:
        raise ConfigError(
            f"[[edge]] {nowhere[0]!r} has no address: of several edges each needs one, or the name "
            "of a device or of the control unit"
        )
    strangers = [edge.name for edge in config.edge_machines if edge is not config.edge]
    if strangers and config.version:
        raise ConfigError(
            f"[[edge]] {strangers[0]!r} has no token to join by: in a file that `collapipe "
            "cluster` keeps, further edges are devices or the control unit, by their names"
        )
    atop = [edge for edge in config.edges if edge.name == config.control_unit.name]
    hosts = (*config.devices, *config.edge_machines, *atop)
    addresses = [member.address for member in hosts if member.address]
    shared = [address for address in addresses if addresses.count(address) > 1]
    if shared:
        raise ConfigError(f"two members have the address {shared[0]!r}: each needs its own")
    if len(config.devices) == 1 and config.devices[0].name in edges:
        raise ConfigError(
            f"[edge] names {config.devices[0].name!r}, the only device: no other is left to hold "
            "blocks"
        )


def _check_way(config: ClusterConfig, index: int, device: MemberConfig) -> None:
    """Raise ConfigError unless it is said once how a device is reached."""
    if not device.dials:
        if not device.address:
            raise ConfigError(f"device[{index}].address of {device.name} is missing")
        return
    if device.address:
        raise ConfigError(
            f"device[{index}] of {device.name} dials, so it has no address: leave one of them out"
        )
    if config.tls is None:
        raise ConfigError(f"device[{index}] of {device.name} dials, which needs [tls]")
    if not (config.relay_address or config.version):
        raise ConfigError(
            f"device[{index}] of {device.name} dials, and nothing says where: give relay or "
            "control-unit.address"
        )


def list_certificate_hosts(clusters: Iterable[ClusterConfig]) -> dict[str, tuple[str, ...]]:
    """Return members' names with their certificates' hosts; edges may be in several clusters.

    Devices are verified by name only: with the host of a machine that also runs the edge or the
    SuperLink, a device could pass as those.
    """
    hosts: dict[str, tuple[str, ...]] = {}
    for member, role in (found for cluster in clusters for found in cluster.roles):
        own = () if role is Role.DEVICE else filter(None, [member.host])
        hosts[member.name] = (*hosts.get(member.name, ()), *own)
    return hosts


def format_cluster(config: ClusterConfig) -> str:
    """Write the TOML that `parse_cluster` reads as ``config``, without keys at their defaults."""
    measured = config.measured and Path(os.path.relpath(config.measured, config.folder))
    devices = tuple(replace(d, address="") if d.dials else d for d in config.devices)
    edge, *others = (replace(e, address="", dials=False) if e.dials else e for e in config.edges)
    config = replace(config, devices=devices, edge=edge, other_edges=tuple(others))
    lines = list(_write_lines(_select_changed(replace(config, measured=measured), _USUAL)))
    tables = [
        (f"[{name}]", _select_changed(getattr(config, field), getattr(_USUAL, field)))
        for name, field in _TABLES.items()
    ]
    if config.other_edges:
        usual = replace(_USUAL.edge, name="")
        tables[1:2] = [("[[edge]]", _select_changed(edge, usual)) for edge in config.edges]
    tables[1:1] = [
        ("[[device]]", _select_changed(device, MemberConfig())) for device in config.devices
    ]
    for head, keys in tables:
        lines += ["", head, *_write_lines(keys)] if keys else []
    if config.tls is not None:
        lines += ["", "[tls]", *_write_lines(_select_changed(config.tls, TlsConfig()))]
    return _HEAD + "\n".join(lines) + "\n"


def _select_changed(section: object, default: object) -> dict[str, Value]:
    usual = flatten_section(default, "")
    return {k: value for k, value in flatten_section(section, "").items() if value != usual[k]}


def _write_lines(keys: Mapping[str, Value]) -> Iterator[str]:
    """Yield lines of TOML: JSON's strings, numbers and booleans are TOML's, too."""
    return (f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in keys.items())
