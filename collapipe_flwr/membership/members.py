"""Calls from a control unit to the members of its clusters: rosters to them, their status back.

A member that does not have the newest roster gets it again, ever more rarely, until it has.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from collapipe_flwr.cluster.profile import Measurements
from collapipe_flwr.config.access_control import SERVICE_NAME
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, Role
from collapipe_flwr.core.errors import CollaPipeError, LinkError
from collapipe_flwr.membership.figures import read_figures
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.transport.connection import Connection
from collapipe_flwr.transport.methods import STATUS, HostStatus
from collapipe_flwr.transport.roster import Roster, send_roster

_log = logging.getLogger(__name__)
_ROSTER_S, _STATUS_S = 3.0, 2.0  # deadlines
_LOOK_S = 0.25
_RENEW_S = 12 * 3600.0  # between looks at the dates of certificates
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0
_SAID_FROM_S = 4.0  # of pauses: it is not just about to start
_ROSTERS_AT_ONCE, _STATUS_AT_ONCE = 16, 32
READY, STOPPING, AWAY, EXPECTED = "ready", "stopping", "away", "has not joined"
BEHIND = "behind"  # it has an older roster, for another moment


def list_callable(config: ClusterConfig) -> tuple[MemberConfig, ...]:
    """List the members that have joined and can be called."""
    members = (
        *config.devices,
        *config.edge_machines,
        *([config.control_unit] if config.joining else []),
    )
    return tuple(m for m in members if m.address and m.fingerprint)


def connect_to(
    config: ClusterConfig, member: MemberConfig, deadline_s: float, *, as_registrar: bool = False
) -> Connection:
    """Connect to a member by the first certificate, control unit's or registrar's, with a key here.

    A member knows the registrar before it knows the control unit of another cluster.
    """
    names = [config.control_unit.name, SERVICE_NAME]
    ours = [config.tls_files(name) for name in (reversed(names) if as_registrar else names)]
    here = (own for own in ours if own is None or own.key is None or own.key.exists())
    return Connection(
        member.address,
        what=member.name,
        tls=next(here, ours[-1]),
        certificate_name=config.certificate_name(member),
        deadline_s=deadline_s,
    )


def send_rosters(
    config: ClusterConfig,
    members: Iterable[MemberConfig],
    roster: Roster,
    certified: Callable[[str], bytes | None] = lambda _: None,
) -> dict[str, str]:
    """Send these members the roster, side by side; return the failures by name, empty if none.

    Each gets the certificate in which it is ``certified`` besides.
    """
    members = list(members)

    def send(member: MemberConfig) -> str:
        own = replace(roster, certificate=(certified(member.name) or b"").decode())
        return _send(config, member, own)

    with ThreadPoolExecutor(_ROSTERS_AT_ONCE, thread_name_prefix="rosters") as pool:
        faults = pool.map(send, members)
        return {member.name: fault for member, fault in zip(members, faults, strict=True)}


def _send(config: ClusterConfig, member: MemberConfig, roster: Roster) -> str:
    try:
        with connect_to(config, member, _ROSTER_S, as_registrar=True) as connection:
            version = send_roster(connection, roster)
    except LinkError as error:
        return str(error)
    if version > config.version:
        return (
            f"{member.name} has version {version} of the roster, and {config.path} is of version "
            f"{config.version}: bring back the newer file"
        )
    return ""


class RosterSender:
    """Watches the clusters of a registry, and sends their members every new roster."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._sent: dict[tuple[str, str, str], int] = {}  # cluster, member, fingerprint: version
        self._pauses: dict[tuple[str, str, str], tuple[float, float]] = {}  # until, length
        self._renew_from_s = -math.inf

    def watch(self, stop: threading.Event) -> None:
        """Send rosters until ``stop``."""
        while not stop.wait(_LOOK_S):
            try:
                self.look()
            except CollaPipeError as error:  # a file that somebody is editing
                _log.error("rosters are not sent: %s", error)
                stop.wait(_SAID_FROM_S)

    def look(self) -> None:
        """Send the newest roster to members that lack it, with a pause after each failure.

        Tokens that expired meanwhile become worthless, and certificates are renewed in time.
        """
        self._registry.void_expired()
        if self._clock() >= self._renew_from_s:
            self._renew_from_s = self._clock() + _RENEW_S
            with self._registry.lock():
                told = self._registry.renew(datetime.now(UTC))
            for sentence in told:
                _log.warning("%s", sentence)
        for config in self._registry.clusters().values():
            members = {(config.id, m.name, m.fingerprint): m for m in list_callable(config)}
            due = [
                key
                for key in members
                if self._sent.get(key) != config.version
                and self._clock() >= self._pauses.get(key, (0.0, 0.0))[0]
            ]
            if due:
                roster = self._registry.roster(config)
                faults = send_rosters(
                    config, [members[key] for key in due], roster, self._registry.read_certificate
                )
                for key in due:
                    self._note(key, config.version, faults[members[key].name])

    def _note(self, key: tuple[str, str, str], version: int, fault: str) -> None:
        if not fault:
            self._pauses.pop(key, None)
            self._sent[key] = version
            _log.info("%s has version %d of the roster", key[1], version)
            return
        _, before_s = self._pauses.get(key, (0.0, 0.0))
        pause_s = min(max(2 * before_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._pauses[key] = (self._clock() + pause_s, pause_s)
        if before_s < _SAID_FROM_S <= pause_s:
            _log.warning("%s does not have the newest roster yet: %s", key[1], fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """``state`` is READY, STOPPING, AWAY (with the ``fault``), EXPECTED or BEHIND.

    ``roster`` is the version in force there (None: unknown), ``resident_bytes`` its daemon's
    memory; speed and memory are those that plans use, None where it was not measured.
    """

    name: str
    role: str
    address: str
    state: str
    roster: int | None = None
    speed_flop_per_s: float | None = None
    memory_bytes: int | None = None
    resident_bytes: int | None = None
    clock_ahead_s: float | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """A cluster at one moment; ``version`` is that of its file here."""

    cluster_id: str
    version: int
    members: tuple[MemberStatus, ...]

    @property
    def complete(self) -> bool:
        """Whether all members are ready, with the newest roster."""
        return all(member.state == READY for member in self.members)


def ask_cluster(config: ClusterConfig) -> ClusterStatus:
    """Ask all at once: devices, edge, and a control unit on another machine than the CA."""
    members = [(device, Role.DEVICE) for device in config.devices]
    machines = config.edge_machines
    members += [(edge, Role.EDGE) for edge in machines if edge.address or config.version]
    if config.joining:
        members.append((config.control_unit, Role.CONTROL_UNIT))
    known = read_figures(config)
    with ThreadPoolExecutor(_STATUS_AT_ONCE, thread_name_prefix="status") as pool:
        found = tuple(pool.map(lambda each: _ask_member(config, known, *each), members))
    return ClusterStatus(cluster_id=config.id, version=config.version, members=found)


def _ask_member(
    config: ClusterConfig, known: Measurements, member: MemberConfig, role: Role
) -> MemberStatus:
    measured = known.find(member.name)
    speed = member.speed_gflop_per_s * 1e9 or measured.speed_flop_per_s
    memory = int(member.memory_mb * 1e6) or measured.memory_bytes

    def status(state: str, fault: str = "", found: HostStatus | None = None) -> MemberStatus:
        return MemberStatus(
            name=member.name,
            role=role.value,
            address=member.address,
            state=state,
            roster=found.rosters.get(config.id) if found else None,
            speed_flop_per_s=speed,
            memory_bytes=memory,
            resident_bytes=found.resident_bytes if found else None,
            clock_ahead_s=found.unix_s - time.time() if found else None,
            fault=fault,
        )

    if not member.address or (config.version and not member.fingerprint):
        return status(EXPECTED)
    try:
        with connect_to(config, member, _STATUS_S) as connection:
            found = connection.call(STATUS, answer=HostStatus)
    except LinkError as error:
        return status(AWAY, str(error))
    behind = config.version > 0 and found.rosters.get(config.id) != config.version
    return status(STOPPING if found.stopping else BEHIND if behind else READY, found=found)
