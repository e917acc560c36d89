"""The folder in which clusters are kept: CA, cluster files, tokens.

Every change is made under the folder's lock, because commands and the joining service are separate
processes; every file is replaced as a whole. The version of a cluster file grows with each change
of its members.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe_flwr.config.access_control import SERVICE_NAME
from collapipe_flwr.config.cluster_file import (
    ClusterConfig,
    MemberConfig,
    Role,
    TlsConfig,
    format_cluster,
    parse_cluster,
    read_cluster,
)
from collapipe_flwr.core.durable import make_own_folder, write_file, write_private, write_text
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.membership.tokens import SECRET_BYTES, JoinToken, TokenBook
from collapipe_flwr.transport.certificates import (
    Authority,
    check_names,
    is_ip_address,
    list_names,
)
from collapipe_flwr.transport.joining import extract_keys
from collapipe_flwr.transport.roster import Roster, sign_roster
from collapipe_flwr.transport.tls import fingerprint, is_due, read_validity

SHARED = (Role.EDGE, Role.SERVER)  # of all clusters of a folder
_SINGLE = (Role.CONTROL_UNIT, *SHARED)
_CERTS, _LOCK, _TOKENS = "certs", ".lock", "tokens.json"
_one_change = threading.Lock()  # the effective user is one of the whole process
_OF_THE_SYSTEM = Path("/etc/collapipe")
DEPLOYED = _OF_THE_SYSTEM / "control-unit"  # where `collapipe deploy` keeps clusters


def default_folder() -> Path:
    """Choose the folder of a cluster's files: /etc/collapipe for root, else in the user's own."""
    if (named := os.environ.get("COLLAPIPE_FOLDER", "")) != "":
        return Path(named)
    if os.geteuid() == 0:
        return _OF_THE_SYSTEM
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "collapipe"


def open_registry(folder: Path | None, cluster_id: str = "") -> Registry:
    """Open the registry of ``folder``, or of the first usual folder that keeps the cluster.

    An empty ``cluster_id`` is any. Raises ConfigError that names the folders where none is.
    """
    if folder is not None or os.environ.get("COLLAPIPE_FOLDER"):
        return Registry(folder or default_folder())
    looked: list[str] = []
    for path in dict.fromkeys((default_folder(), _OF_THE_SYSTEM, DEPLOYED)):
        if path.exists() and not os.access(path, os.R_OK | os.X_OK):
            raise ConfigError(
                f"clusters of this machine are kept in {path}, which this user may not read: use "
                "sudo"
            )
        registry = Registry(path)
        if known := registry.clusters():
            if not cluster_id or cluster_id in known:
                return registry
            looked.append(f"{path} ({', '.join(known)})")
        else:
            looked.append(str(path))
    what = f"no cluster {cluster_id!r}" if cluster_id else "no cluster"
    raise ConfigError(
        f"{what} is kept in {' or '.join(looked)}: run this on the machine where it was made (by "
        "`collapipe cluster init NAME`), or name its folder with --folder"
    )


class Registry:
    """The clusters of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certs = folder / _CERTS
        self.tokens = TokenBook(folder / _TOKENS)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for the body; raises ConfigError where it is not ours.

        Tokens that have expired meanwhile become worthless.
        """
        with _one_change, ExitStack() as stack:
            make_own_folder(self.folder, "--folder")
            stack.enter_context(_act_as_owner(self.folder))
            try:
                lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise ConfigError(f"{self.folder} cannot be changed: {error.strerror}") from error
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.tokens.void_expired(time.time())
            yield

    def clusters(self) -> dict[str, ClusterConfig]:
        """Read the clusters that `collapipe cluster` keeps here, by id."""
        found = (read_cluster(path) for path in sorted(self.folder.glob("*.toml")))
        return {config.id: config for config in found if config.version}

    def read_handwritten(self) -> tuple[ClusterConfig, ...]:
        """Read the other cluster files here that have devices which dial."""
        found = (read_cluster(path) for path in sorted(self.folder.glob("*.toml")))
        return tuple(config for config in found if config.diallers and not config.version)

    def cluster(self, cluster_id: str = "") -> ClusterConfig:
        """Read the cluster of that id, or the only one; raises ConfigError naming all there are."""
        known = self.clusters()
        if not known:
            raise ConfigError(
                f"no cluster is kept in {self.folder}: make one with `collapipe cluster init "
                "NAME`, or name its folder with --folder"
            )
        if not cluster_id and len(known) == 1:
            return next(iter(known.values()))
        if cluster_id not in known:
            what = f"no cluster {cluster_id!r} is" if cluster_id else "more than one cluster is"
            raise ConfigError(f"{what} kept in {self.folder}: choose one of {', '.join(known)}")
        return known[cluster_id]

    @property
    def ca(self) -> Path:
        """The certificate of the CA; raises ConfigError where there is none."""
        path = self.certs / "ca.pem"
        if not path.exists():
            raise ConfigError(f"{path} is missing: only the machine of `cluster init` has the CA")
        return path

    def create(
        self,
        cluster_id: str,
        control_unit: MemberConfig,
        edge_address: str,
        elsewhere: frozenset[Role] = frozenset(),
    ) -> ClusterConfig:
        """Make the cluster, and the certificates of members that are here; under the lock.

        Members in the roles ``elsewhere`` are on other machines. An existing cluster stays as it
        is.
        """
        known = self.clusters()
        if cluster_id in known:
            return known[cluster_id]
        if f"{cluster_id}.json".casefold() == _TOKENS:
            raise ConfigError(
                f"a cluster cannot be called {cluster_id!r}, because {_TOKENS} keeps the tokens of "
                "all: choose another name"
            )
        path = self.folder / f"{cluster_id}.toml"
        if path.exists():
            raise ConfigError(
                f"{path} is there already, and was written by hand: choose another name or folder"
            )
        config = replace(
            parse_cluster({"id": cluster_id, "version": 1}, self.folder),
            control_unit=control_unit,
            edge=MemberConfig(name="edge", address=edge_address),
            tls=TlsConfig(),
            joining=control_unit.address if Role.CONTROL_UNIT in elsewhere else "",
            measured=self.folder / f"{cluster_id}.json",
            path=path,
        )
        for role in _SINGLE:
            config = self._settle(config, role, known, elsewhere)
        if config.joining:
            Authority(self.certs).issue(SERVICE_NAME)
        config = self._write(config)
        here = (self.certs / f"{config.edge.name}.key").exists()
        if here and not self.edge_folder.exists():
            self._keep_edge(config)
        return config

    @property
    def edge_folder(self) -> Path:
        """The files of an edge on this machine: its own, because it replaces its roster."""
        return self.folder / "edge"

    def _keep_edge(self, config: ClusterConfig) -> None:
        name = config.edge.name
        make_own_folder(self.edge_folder / _CERTS, "--folder")
        for file in ("ca.pem", f"{name}.pem", f"{name}.key"):
            pem = (self.certs / file).read_bytes()
            write_private(self.edge_folder / _CERTS / file, pem)
        assert config.path is not None
        write_text(self.edge_folder / config.path.name, format_cluster(config))

    def _settle(
        self,
        config: ClusterConfig,
        role: Role,
        known: Mapping[str, ClusterConfig],
        elsewhere: frozenset[Role],
    ) -> ClusterConfig:
        """Set a role's member: that of other clusters, one that will join, or a new one here."""
        if role in SHARED and known:
            return _set_member(config, role, find_single(next(iter(known.values())), role))
        member = find_single(config, role)
        if role in elsewhere:
            return _set_member(config, role, replace(member, address="", fingerprint=""))
        hosts = list_hosts(member, role)
        self._check_names(member.name, hosts)
        files = Authority(self.certs).issue(member.name, hosts)
        assert files.certificate is not None
        shown = fingerprint(files.certificate.read_bytes())
        return _set_member(config, role, replace(member, fingerprint=shown))

    def read_certificate(self, name: str) -> bytes | None:
        """Read the certificate that was signed here for a member, in PEM; None without one."""
        path = self.certs / f"{name}.pem"
        return path.read_bytes() if path.exists() else None

    def certify(self, name: str, hosts: tuple[str, ...], key: ec.EllipticCurvePublicKey) -> bytes:
        """Sign for a key on another machine; raises ConfigError as `check_names`."""
        self._check_names(name, hosts)
        return Authority(self.certs).certify_key(name, hosts, key)

    def renew(self, now: datetime) -> list[str]:
        """Sign certificates anew that are about to end; return a sentence each. Under the lock.

        Their keys stay, so members may show either until the first ends. What was left half done is
        finished. That of a member to whom nothing can be brought is named only.
        """
        told = []
        for cluster_id in self.clusters():
            for role in Role:
                for member in self.cluster(cluster_id).list_in_role(role):
                    told += self._renew_member(self.cluster(cluster_id), role, member, now)
        if is_due(self.ca.read_bytes(), now):
            told.append(
                f"the CA in {self.certs} {_say_end(self.ca.read_bytes())}: make clusters anew"
            )
        if (service := self.read_certificate(SERVICE_NAME)) is not None and is_due(service, now):
            self.issue_service_files()
        return told

    def _renew_member(
        self, config: ClusterConfig, role: Role, member: MemberConfig, now: datetime
    ) -> list[str]:
        pem = self.read_certificate(member.name) if member.fingerprint else None
        if pem is None or (fingerprint(pem) == member.fingerprint and not is_due(pem, now)):
            return []
        here = (self.certs / f"{member.name}.key").exists()
        if read_validity(pem)[1] <= now or (role is Role.SERVER and not here):
            again = "let it join again by a new token"
            return [f"the certificate of {member.name} {_say_end(pem)}: {again}"]
        if fingerprint(pem) == member.fingerprint:
            key = x509.load_pem_x509_certificate(pem).public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            pem = self.certify(member.name, list_hosts(member, role), key)
        earlier, shown = member.fingerprint, fingerprint(pem)
        member = replace(member, fingerprint=shown, earlier_fingerprint=earlier)
        self.admit(config, role, member)
        return [f"the certificate of {member.name} is renewed and {_say_end(pem)}"]

    def _check_names(self, name: str, hosts: tuple[str, ...]) -> None:
        if name.casefold() == SERVICE_NAME:
            raise ConfigError(f"{SERVICE_NAME} lets newcomers in: choose another name")
        if is_ip_address(name):
            raise ConfigError(
                f"a member cannot be called {name!r}, an address where it could pass as another: "
                "choose another name"
            )
        signed = list_names(self.certs) if self.certs.is_dir() else {}
        check_names({name: hosts}, {n: h for n, h in signed.items() if n != name})

    def admit(self, config: ClusterConfig, role: Role, member: MemberConfig) -> ClusterConfig:
        """Add a member in its role; an edge or server joins all clusters here.

        Files that list it already stay as they are.
        """
        others = [c for c in self.clusters().values() if role in SHARED and c.id != config.id]
        config, *_ = [self._add(each, role, member) for each in (config, *others)]
        return config

    def _add(self, config: ClusterConfig, role: Role, member: MemberConfig) -> ClusterConfig:
        changed = _set_member(config, role, member)
        return config if changed == config else self._write(changed)

    def remove(self, config: ClusterConfig, name: str) -> ClusterConfig:
        """Remove a member, whose certificate and token are worthless from now on.

        Raises ConfigError for one whose key is in this folder.
        """
        member = config.member(name)
        if (self.certs / f"{name}.key").exists():
            raise ConfigError(
                f"{name} of {config.id} is on this machine, and its key with it: only members "
                "that joined by a token can be removed"
            )
        self.tokens.revoke(name)
        if (pem := self.read_certificate(name)) is not None:
            removed = self.certs / f"{name}.removed"  # all of that name, one after the other
            pems = (removed.read_bytes() if removed.exists() else b"") + pem
            write_file(removed, lambda path: path.write_bytes(pems))
        if member in config.devices:
            left = tuple(device for device in config.devices if device != member)
            return self._write(replace(config, devices=left))
        role = next(role for role in _SINGLE if find_single(config, role) == member)
        return self.admit(config, role, replace(member, address="", fingerprint=""))

    def was_removed(self, name: str, key_bytes: bytes) -> bool:
        """Return whether a member of that name was removed with this key."""
        path = self.certs / f"{name}.removed"
        return path.exists() and key_bytes in extract_keys(path.read_bytes())

    def void_expired(self) -> None:
        """Make tokens whose time is over worthless, also by a clock that is put back later."""
        if self.tokens.has_expired(time.time()):
            with self.lock():
                pass

    def roster(self, config: ClusterConfig) -> Roster:
        elsewhere, measured = bool(config.joining), config.measured
        figures = measured.read_text() if elsewhere and measured and measured.exists() else ""
        return sign_roster(format_cluster(config), Authority(self.certs).sign, figures)

    def issue_service_files(self) -> TlsFiles:
        """Issue the joining service a new certificate with its CA, which newcomers know by its pin.

        Under the lock.

        With it one can ask members for their status, and nothing else.
        """
        files = Authority(self.certs).issue(SERVICE_NAME)
        assert files.certificate is not None
        chain = self.certs / f"{SERVICE_NAME}.chain"
        write_text(chain, files.certificate.read_text() + self.ca.read_text())
        return TlsFiles(certificate=chain, key=files.key)

    def _write(self, config: ClusterConfig) -> ClusterConfig:
        path = config.path
        assert path is not None
        if path.exists():
            config = replace(config, version=config.version + 1)
        text = format_cluster(config)
        parse_cluster(tomllib.loads(text), self.folder)  # members must be able to read it
        write_text(path, text)
        return read_cluster(path)


def issue_token(
    registry: Registry, config: ClusterConfig, role: Role, *, members: int, minutes: float
) -> JoinToken:
    """Issue a token by which so many members may join in a role; call under the registry's lock.

    Raises ConfigError where the cluster file has no address for newcomers.
    """
    if not config.joining_address:
        raise ConfigError(
            f"{config.path} has no address of the control unit, where newcomers are let in"
        )
    token = JoinToken(
        cluster_id=config.id,
        address=config.joining_address,
        pin=bytes.fromhex(fingerprint(registry.ca.read_bytes())),
        secret=secrets.token_bytes(SECRET_BYTES),
        role=role,
    )
    registry.tokens.add(token, members, now_s=time.time(), valid_s=60.0 * minutes)
    return token


@contextmanager
def _act_as_owner(folder: Path) -> Iterator[None]:
    """Let root write files that the folder's owner, a service, can read."""
    found = folder.stat()
    if os.geteuid() != 0 or found.st_uid == 0:
        yield
        return
    group = os.getegid()
    os.setegid(found.st_gid)
    os.seteuid(found.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def find_single(config: ClusterConfig, role: Role) -> MemberConfig:
    """Look up the member of a role that only one member has."""
    return (*config.list_in_role(role), config.edge)[0]


def list_hosts(member: MemberConfig, role: Role = Role.DEVICE) -> tuple[str, ...]:
    """List the hosts in a certificate: a server's, which Flower's programs verify, and loopback.

    Members verify each other by name. A host in a newcomer's certificate is what it says of itself,
    and would let it pass as a server there.
    """
    return tuple(filter(None, (member.host, "127.0.0.1"))) if role is Role.SERVER else ()


def _say_end(pem: bytes) -> str:
    return f"ends on {read_validity(pem)[1]:%Y-%m-%d}"


def _set_member(config: ClusterConfig, role: Role, member: MemberConfig) -> ClusterConfig:
    match role:
        case Role.CONTROL_UNIT:
            return replace(config, control_unit=member)
        case Role.EDGE:
            return replace(config, edge=member)
        case Role.SERVER:
            return replace(config, server=member)
    others = tuple(d for d in config.devices if d.name != member.name)
    return replace(config, devices=(*others, member))
