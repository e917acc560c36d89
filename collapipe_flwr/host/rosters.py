"""The cluster files of a running host, replaced by newer ones that the CA signed, on disk first.

A caller that the newer file does not list is refused from then on, also after a restart, and its
calls are cut. A host that none of its files lists has been removed, and stops.
"""

from __future__ import annotations

import logging
import threading
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from collapipe_flwr.config.access_control import AccessControl, access_control
from collapipe_flwr.config.cluster_file import (
    ClusterConfig,
    format_cluster,
    parse_cluster,
    read_cluster,
)
from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import ConfigError, LinkError, ProtocolError
from collapipe_flwr.transport.roster import Roster, check_roster
from collapipe_flwr.transport.tls import read_validity

_log = logging.getLogger(__name__)
_LOOK_S = 0.5


class Rosters:
    """The clusters of the host called ``name``, read from files, whose CA is ``ca``."""

    def __init__(
        self, name: str, clusters: Iterable[ClusterConfig], ca: Path, allow: Iterable[str] = ()
    ) -> None:
        self._name, self._ca, self._allow = name, ca, tuple(allow)
        self._clusters = {config.id: config for config in clusters}
        self._lock = threading.Lock()
        self.access = access_control(self._clusters.values(), self._allow)
        self.on_change: Callable[[AccessControl], object] = lambda _: None
        self.on_removed: Callable[[str], object] = lambda _: None
        self.on_newer: Callable[[ClusterConfig, Roster], object] = lambda *_: None

    @property
    def versions(self) -> dict[str, int]:
        """The versions of the files in force, by cluster id."""
        return {name: config.version for name, config in self._clusters.items()}

    @property
    def clusters(self) -> tuple[ClusterConfig, ...]:
        """The files in force."""
        return tuple(self._clusters.values())

    def accept(self, roster: Roster) -> int:
        """Apply a roster if it is newer; return the version that is in force now.

        Raises ProtocolError for one that this CA did not sign or that cannot be read, and LinkError
        where it cannot be written.
        """
        if not self._clusters:
            raise ProtocolError(f"{self._name} was started without a cluster file")
        check_roster(roster, self._ca)
        with self._lock:
            self._renew(roster.certificate)
            config = self._parse(roster.text)
            held = self._clusters.get(config.id)
            if held is not None and held.version >= config.version:
                return held.version
            if held is None and self._name not in config.names:
                raise ProtocolError(f"{self._name} is no member of {config.id}")
            asked = config.privacy
            if held is not None:  # no roster revokes the privacy that this machine's file demands
                config = replace(config, privacy=asked | held.privacy)
            known = {**self._clusters, config.id: config}
            access = access_control(known.values(), self._allow)
            self.on_newer(config, roster)
            assert config.path is not None
            _write(config.path, roster.text if config.privacy == asked else format_cluster(config))
            self._apply(known, access)
            removed = not any(each.has_joined(self._name) for each in known.values())
        _log.info("the roster of %s has version %d", config.id, config.version)
        if removed:
            self.on_removed(f"{self._name} was removed from {config.id}")
        return config.version

    def _renew(self, pem: str) -> None:
        """Replace this member's certificate by one that ends later, for the same key.

        Raises ProtocolError for one that is not of this CA, name and key.
        """
        files = next(iter(self.clusters)).tls_files(self._name)
        path = None if files is None else files.certificate
        if not pem or path is None or not path.exists():  # it was given by an option
            return
        shown = path.read_bytes()
        if read_validity(pem.encode())[1] <= read_validity(shown)[1]:
            return
        from collapipe_flwr.transport import joining  # a daemon that waits holds little memory

        key = joining.extract_key(shown)
        joining.check_signed(pem, self._name, key, self._ca.read_bytes())
        _write(path, pem)
        _log.info("the certificate of %s is renewed", self._name)

    def follow_files(self, stop: threading.Event) -> None:
        """Apply what another process of this machine writes into the files, until ``stop``."""
        while not stop.wait(_LOOK_S):
            for held in self.clusters:
                assert held.path is not None
                try:
                    found = read_cluster(held.path)
                    with self._lock:
                        if found.version > self.versions[held.id]:
                            known = {**self._clusters, held.id: found}
                            self._apply(known, access_control(known.values(), self._allow))
                except ConfigError as error:  # somebody edits it
                    _log.debug("a roster is not read: %s", error)

    def _apply(self, known: dict[str, ClusterConfig], access: AccessControl) -> None:
        """Admit only these clusters; the caller holds the lock, so the newest is applied last."""
        self._clusters, self.access = known, access
        self.on_change(access)

    def _parse(self, text: str) -> ClusterConfig:
        """Parse the roster, with the path of the file that it replaces."""
        beside = next(iter(self._clusters.values())).path
        assert beside is not None
        try:
            config = parse_cluster(tomllib.loads(text), beside.resolve().parent)
        except (ConfigError, tomllib.TOMLDecodeError) as error:
            raise ProtocolError(f"the roster cannot be read: {error}") from error
        held = self._clusters.get(config.id)
        path = held.path if held is not None else beside.with_name(f"{config.id}.toml")
        return replace(config, path=path)


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise LinkError(f"the roster cannot be kept in {path}: {error}") from error
