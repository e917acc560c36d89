"""Rosters on their way: whoever has not got the newest one is told again until it has."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from collapipe_flwr.config.access_control import SERVICE_NAME
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig
from collapipe_flwr.core.errors import CollaPipeError, LinkError
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.transport.connection import Connection
from collapipe_flwr.transport.roster import Roster, send_roster

_log = logging.getLogger(__name__)
_DEADLINE_S = 3.0
_LOOK_S = 0.25
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 4.0
_AT_ONCE = 16


def listeners(config: ClusterConfig) -> tuple[MemberConfig, ...]:
    """The members that have joined and can be told something."""
    members = (*config.devices, config.edge, *([config.control_unit] if config.joining else []))
    return tuple(m for m in members if m.address and m.fingerprint)


def connection_to(config: ClusterConfig, member: MemberConfig, deadline_s: float) -> Connection:
    """To a member, by the control unit's own certificate where its key is here."""
    own = config.tls_files(config.control_unit.name)
    here = own is None or own.key is None or own.key.exists()
    return Connection(
        member.address,
        what=member.name,
        tls=own if here else config.tls_files(SERVICE_NAME),
        certificate_name=member.name if config.tls else "",
        deadline_s=deadline_s,
    )


def tell(config: ClusterConfig, members: Iterable[MemberConfig], roster: Roster) -> dict[str, str]:
    """Bring these members the roster, side by side; why it failed by name, empty where it did not.

    Each has a few seconds.
    """
    told = list(members)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="herald") as pool:
        faults = pool.map(lambda member: _told(config, member, roster), told)
        return {member.name: fault for member, fault in zip(told, faults, strict=True)}


def _told(config: ClusterConfig, member: MemberConfig, roster: Roster) -> str:
    try:
        with connection_to(config, member, _DEADLINE_S) as connection:
            version = send_roster(connection, roster)
    except LinkError as error:
        return str(error)
    if version > config.version:
        return (
            f"{member.name} has version {version} of the roster, and {config.path} is of version "
            f"{config.version}: bring back the newer file"
        )
    return ""


class Herald:
    """Watches the clusters of a registry, and tells their members of every change."""

    def __init__(self, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._told: dict[tuple[str, str, str], int] = {}  # cluster, member, fingerprint: version
        self._pauses: dict[tuple[str, str, str], tuple[float, float]] = {}  # until, length

    def watch(self, stop: threading.Event) -> None:
        """Until ``stop``."""
        while not stop.wait(_LOOK_S):
            try:
                self.look()
            except CollaPipeError as error:  # a file that is being mended
                _log.error("members are not told: %s", error)
                stop.wait(_LONGEST_PAUSE_S)

    def look(self) -> None:
        """Tell whoever does not have the newest roster, and has not been asked just now."""
        for config in self._registry.clusters().values():
            due = [m for m in listeners(config) if self._is_due(config, m)]
            if due:
                self._note(config, due, tell(config, due, self._registry.roster(config)))

    def _is_due(self, config: ClusterConfig, member: MemberConfig) -> bool:
        key = (config.id, member.name, member.fingerprint)
        until_s, _ = self._pauses.get(key, (0.0, 0.0))
        return self._told.get(key) != config.version and self._clock() >= until_s

    def _note(
        self, config: ClusterConfig, members: list[MemberConfig], faults: Mapping[str, str]
    ) -> None:
        for member in members:
            key = (config.id, member.name, member.fingerprint)
            if fault := faults[member.name]:
                _, before_s = self._pauses.get(key, (0.0, 0.0))
                pause_s = min(max(2 * before_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._pauses[key] = (self._clock() + pause_s, pause_s)
                if before_s < pause_s == _LONGEST_PAUSE_S:  # it is not just about to start
                    _log.warning("%s does not have the newest roster yet: %s", member.name, fault)
            else:
                self._pauses.pop(key, None)
                self._told[key] = config.version
                _log.info("%s has version %d of the roster", member.name, config.version)
