"""Who may call which methods of a host: the members of its cluster files, by role.

| role | on a device | on the edge | on a text server |
|---|---|---|---|
| control unit | everything | open sessions for its own cluster, and use those | ask |
| device | stream into a session that it has the token of | the same | - |
| server | ask how it is | ask how it is and how far rounds are | - |
| edge | ask how it is | - | - |
| registrar (admits newcomers) | ask how it is; bring a roster | the same | - |

The control unit, too, brings rosters, which the CA has signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, Role
from collapipe_flwr.core.errors import ConfigError

SERVICE_NAME = "collapipe-joining"  # in the registrar's certificate; no member has this name
ASK = frozenset({"Echo", "Status"})
_STREAM = ASK | {"Stream"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A member as its certificate proves it; without a role it is trusted by name (`--allow`).

    ``fingerprints`` are those of the certificates that it may show; None: any with its name.
    """

    name: str
    role: Role | None = None
    clusters: frozenset[str] = frozenset()
    fingerprints: frozenset[str] | None = None

    def may_show(self, fingerprint: str) -> bool:
        """Return whether a certificate with its name is its own, by its SHA-256."""
        return self.fingerprints is None or fingerprint in self.fingerprints

    def may_call(self, method: str, *, on_edge: bool) -> bool:
        """Return whether the role needs this method on such a host."""
        match self.role:
            case None | Role.CONTROL_UNIT:
                return True
            case Role.DEVICE:
                return method in _STREAM
            case Role.SERVER:
                return method in ASK or (on_edge and method == "Progress")
            case Role.REGISTRAR:
                return method in ASK or method == "Roster"
            case Role.EDGE:
                return method in ASK

    def may_use(self, method: str, *, cluster_id: str, opener: str) -> bool:
        """Return whether it may do this to a session of ``cluster_id`` opened by ``opener``."""
        if self.role is None:
            return True
        return cluster_id in self.clusters and (method == "Stream" or self.name == opener)

    def cluster_of(self, wanted: str) -> str:
        """Return the cluster of a session that it opens; raises ConfigError for another's."""
        if self.role is not Role.CONTROL_UNIT:
            return wanted
        if wanted and wanted not in self.clusters:
            raise ConfigError(f"{self.name} opens no session for the cluster {wanted[:80]}")
        return wanted or min(self.clusters)


@dataclass(frozen=True, slots=True)
class AccessControl:
    """The callers by the common names of their certificates."""

    callers: Mapping[str, Caller]

    @property
    def control_units(self) -> int:
        """How many clusters share a host."""
        return sum(caller.role is Role.CONTROL_UNIT for caller in self.callers.values())

    def knows(self, name: str, fingerprint: str) -> bool:
        """Return whether that is a caller with a certificate of its own."""
        return name in self.callers and self.callers[name].may_show(fingerprint)


def access_control(clusters: Iterable[ClusterConfig], allow: Iterable[str] = ()) -> AccessControl:
    """Admit the members in these files, and the names in ``allow``.

    Edge and server may serve several clusters; raises ConfigError when another member is named in
    two files, because its certificate would open both.
    """
    callers = {name: Caller(name=name) for name in allow}
    named: dict[str, Caller] = {}
    for config in clusters:
        if config.version:
            named[SERVICE_NAME] = Caller(name=SERVICE_NAME, role=Role.REGISTRAR)
        for member, role in config.roles:
            named[member.name] = _add_to_caller(named.get(member.name), member, role, config)
    return AccessControl({**callers, **named})


def _add_to_caller(
    known: Caller | None, member: MemberConfig, role: Role, config: ClusterConfig
) -> Caller:
    """Add what one file says of a caller to what earlier files said."""
    shown = member.fingerprints if config.version else None
    clusters = frozenset({config.id})
    if known is None:
        return Caller(name=member.name, role=role, clusters=clusters, fingerprints=shown)
    if clusters <= known.clusters:
        raise ConfigError(f"two cluster files have the id {config.id!r}: give each its own")
    if role not in (Role.EDGE, Role.SERVER) or known.role is not role:
        raise ConfigError(
            f"{member.name!r} is a member of {min(known.clusters)} and of {config.id}: names must "
            "differ, because they are what certificates prove"
        )
    before = known.fingerprints
    return replace(
        known,
        clusters=known.clusters | clusters,
        fingerprints=None if before is None or shown is None else before | shown,
    )
