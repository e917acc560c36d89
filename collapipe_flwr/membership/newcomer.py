"""Joining a cluster, on the machine that joins: a key of its own, a token, and files at the end.

The cluster file is written last: without it this machine is not a member, and the next attempt
goes on with the same key.
"""

from __future__ import annotations

import re
import socket
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from collapipe_flwr.cluster.profile import Measured
from collapipe_flwr.config.access_control import SERVICE_NAME
from collapipe_flwr.config.cluster_file import (
    MEMBER_NAME,
    ClusterConfig,
    Role,
    parse_cluster,
    read_cluster,
)
from collapipe_flwr.core.durable import make_own_folder, remove, write_file, write_text
from collapipe_flwr.core.errors import ConfigError, ProtocolError, Unreachable, prefix_errors
from collapipe_flwr.core.keys import check
from collapipe_flwr.core.links import TlsFiles, find_own_address, split_address
from collapipe_flwr.core.version import read_own_version
from collapipe_flwr.membership.figures import add_figures
from collapipe_flwr.membership.tokens import JoinToken
from collapipe_flwr.simulation.devices import device_preset
from collapipe_flwr.transport import joining
from collapipe_flwr.transport.connection import Connection
from collapipe_flwr.transport.roster import check_roster
from collapipe_flwr.transport.tls import check_validity, fingerprint, read_validity

PORTS = {Role.DEVICE: 50071, Role.EDGE: 50061, Role.CONTROL_UNIT: 50060, Role.SERVER: 8000}
_DEADLINE_S = 20.0
PATIENCE_S = 20.0  # with a control unit that is starting
_AGAIN_S = 0.5
_BOARD = Path("/proc/device-tree/model")
_KINDS = {
    "raspberry pi 4": "raspberry-pi-4",
    "raspberry pi 5": "raspberry-pi-5",
    "orin nano": "jetson-orin-nano",
    "jetson nano": "jetson-nano",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """This machine as it asks to join; its daemon will listen at ``address``, or it ``dials``."""

    folder: Path
    name: str
    address: str = ""
    dials: bool = False
    kind: str = ""

    @property
    def ca(self) -> Path:
        """The certificate of the CA."""
        return self.folder / "certs" / "ca.pem"

    def own(self, kind: str) -> Path:
        """Its own certificate (``pem``) or private key (``key``)."""
        return self.ca.with_name(f"{self.name}.{kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The role of a machine that has joined."""

    cluster: ClusterConfig
    name: str
    role: Role


def choose_name(role: Role, cluster_id: str) -> str:
    """Name a newcomer by its role, or a device by its host name in allowed characters."""
    if role is Role.CONTROL_UNIT:
        return f"cu-{cluster_id}"
    if role is not Role.DEVICE:
        return role.word
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")
    return host[:63] or "board"


def find_own_host() -> str:
    """Find the address by which others reach this machine; loopback if it has no other."""
    try:
        return find_own_address("192.0.2.1:9")  # RFC 5737: nobody's, so by the default route
    except ConfigError:
        return "127.0.0.1"


def make_reachable(address: str) -> str:
    """Return HOST:PORT for others, where ``address`` may stand for all of this machine."""
    host, port = split_address(address)
    return f"{find_own_host()}:{port}" if host in ("0.0.0.0", "::") else address


def measure_machine(name: str) -> Measured:
    """Measure the speed and free memory of this machine, as `collapipe cluster check` does."""
    from collapipe_flwr.cluster.check import CheckSettings, measure_here

    return measure_here(name, CheckSettings())


def detect_kind() -> str:
    """Detect the preset of this board from its device tree; empty if it is unknown."""
    try:
        model = _BOARD.read_text(errors="replace").casefold()
    except OSError:
        return ""
    return next((kind for words, kind in _KINDS.items() if words in model), "")


def find_membership(newcomer: Newcomer, pin: bytes) -> Membership | None:
    """Find the membership that its files show, if any; none if its certificate has ended.

    Raises ConfigError if the CA is another.
    """
    ca, certificate = newcomer.ca, newcomer.own("pem")
    if not ca.exists():
        return None
    if bytes.fromhex(fingerprint(ca.read_bytes())) != pin:
        raise ConfigError(
            f"{ca} is of another CA than the token's: choose another folder with --folder, "
            f"or delete {newcomer.folder} to leave that cluster"
        )
    if not certificate.exists():
        return None
    pem = certificate.read_bytes()
    shown, ends = fingerprint(pem), read_validity(pem)[1]
    if ends < datetime.now(UTC):
        return None
    for path in sorted(newcomer.folder.glob("*.toml")):
        config = read_cluster(path)
        for member, role in config.roles:
            if member.name == newcomer.name and shown in member.fingerprints:
                return Membership(cluster=config, name=newcomer.name, role=role)
    return None


def join(
    token: JoinToken,
    newcomer: Newcomer,
    measure: Callable[[str], Measured] | None,
    *,
    address: str = "",
    patience_s: float = 0.0,
    say: Callable[[str], object] = lambda _: None,
) -> Membership:
    """Become a member. Raises LinkError when the control unit refuses, is away or is another one.

    ``address`` is that of the control unit, if not where the token says; it gets ``patience_s`` to
    begin to listen. Nothing is measured for a control unit that would refuse.
    """
    check("--name", newcomer.name, MEMBER_NAME)
    if newcomer.address:
        with prefix_errors("--address"):
            split_address(newcomer.address)
    if newcomer.kind:
        with prefix_errors("--kind"):
            device_preset(newcomer.kind)
    if newcomer.ca.with_name("ca.key").exists():
        raise ConfigError(
            f"{newcomer.folder} keeps the cluster itself: choose another folder for this member "
            "with --folder"
        )
    if newcomer.folder.exists():
        make_own_folder(newcomer.folder, "--folder")
    address = address or token.address
    ca_pem = _fetch_ca(address, token.pin, patience_s, say)
    make_own_folder(newcomer.folder, "--folder")
    make_own_folder(newcomer.ca.parent, "--folder")
    check_validity("of the control unit's CA", ca_pem, datetime.now(UTC))
    write_file(newcomer.ca, lambda path: path.write_bytes(ca_pem))
    key = joining.load_or_make_key(newcomer.own("key"))
    request = joining.JoinRequest(
        secret=token.secret.hex(),
        name=newcomer.name,
        request_pem=joining.make_request(newcomer.name, key),
        unix_s=time.time(),
        address=newcomer.address,
        dials=newcomer.dials,
        kind=newcomer.kind,
        version=read_own_version(),
    )
    with Connection(
        address,
        what="control unit",
        tls=TlsFiles(ca=newcomer.ca),
        certificate_name=SERVICE_NAME,  # proved under the pinned CA
        deadline_s=_DEADLINE_S,
    ) as connection:
        if measure is not None:  # which takes a board seconds
            connection.call(joining.JOIN, replace(request, only_asks=True))
            request = _with_figures(request, measure(newcomer.name))
        answer = connection.call(joining.JOIN, request, joining.JoinAnswer)
    own = joining.encode_public_key(key.public_key())
    joining.check_signed(answer.certificate_pem, newcomer.name, own, ca_pem)
    check_roster(answer.roster, newcomer.ca)
    return _settle(newcomer, answer)


def _fetch_ca(address: str, pin: bytes, patience_s: float, say: Callable[[str], object]) -> bytes:
    """Fetch the CA by `joining.fetch_pinned_ca` from a control unit that may just be starting."""
    until_s = time.monotonic() + patience_s
    told = False
    while True:
        try:
            return joining.fetch_pinned_ca(address, pin, _DEADLINE_S)
        except Unreachable as error:
            starts = isinstance(error.__cause__, ConnectionRefusedError)
            if not starts or time.monotonic() >= until_s:
                raise
        if not told:
            say(f"nobody listens at {address} yet: waiting up to {patience_s:g} s for it")
            told = True
        threading.Event().wait(_AGAIN_S)


def _with_figures(request: joining.JoinRequest, found: Measured) -> joining.JoinRequest:
    return replace(
        request,
        unix_s=time.time(),
        speed_flop_per_s=found.speed_flop_per_s or 0.0,
        overhead_s=found.overhead_s or 0.0,
        memory_bytes=found.memory_bytes or 0,
    )


def forget(newcomer: Newcomer) -> None:
    """Delete certificate and key, so that the machine joins as a new one."""
    if newcomer.ca.parent.is_dir():
        remove(newcomer.own("pem"))
        remove(newcomer.own("key"))


def _settle(newcomer: Newcomer, answer: joining.JoinAnswer) -> Membership:
    """Write the files that came back; the cluster file last."""
    path = newcomer.folder / f"{answer.cluster_id}.toml"
    try:
        config = parse_cluster(tomllib.loads(answer.roster.text), newcomer.folder)
        role = Role(answer.role)
    except (ConfigError, ValueError) as error:
        raise ProtocolError(f"the control unit sent an invalid roster: {error}") from error
    if config.id != answer.cluster_id:
        raise ProtocolError(f"the control unit sent the roster of {config.id[:80]}")
    write_file(newcomer.own("pem"), lambda draft: draft.write_text(answer.certificate_pem))
    if role is Role.CONTROL_UNIT:
        add_figures(config, answer.roster)
    write_text(path, answer.roster.text)
    return Membership(cluster=replace(config, path=path), name=newcomer.name, role=role)
