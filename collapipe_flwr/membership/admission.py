"""Admitting newcomers that have a token, over TLS that they can verify.

The use of a token is recorded first, so that a crash never lets one admit more members than it was
made for. A newcomer that did not get the answer asks again with the same key, and gets it. Callers
are not authenticated yet, so the service accepts few calls at once and short messages, and makes an
address wait after a few refusals.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256

import grpc
from cryptography.hazmat.primitives.asymmetric import ec

from collapipe_flwr.cluster.profile import Measured
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, Role
from collapipe_flwr.core.errors import CollaPipeError, ConfigError, ProtocolError
from collapipe_flwr.core.keys import check_keys
from collapipe_flwr.core.texts import to_one_line
from collapipe_flwr.core.version import explain_version
from collapipe_flwr.membership.figures import note_figures
from collapipe_flwr.membership.registry import Registry, find_single, list_hosts
from collapipe_flwr.membership.tokens import JoinRefused, TokenUse
from collapipe_flwr.simulation.devices import device_preset
from collapipe_flwr.transport import joining
from collapipe_flwr.transport.methods import decode_message, encode_message
from collapipe_flwr.transport.server import Server, take_message
from collapipe_flwr.transport.tls import fingerprint, is_due

_log = logging.getLogger(__name__)
_AT_ONCE = 8
MOST_REFUSALS, MOST_OF_ALL, WITHIN_S = 5, 50, 60.0
MESSAGE_BYTES = 16 * 2**10
CLOCKS_DIFFER_S = 12 * 3600.0  # certificates hold from a day before they were made


def admit(
    registry: Registry, request: joining.JoinRequest, clock: Callable[[], float] = time.time
) -> joining.JoinAnswer | None:
    """Make the bearer of a token a member. Raises JoinRefused, with a sentence for its screen.

    A request that ``only_asks`` gets None; neither its token nor the cluster changes.
    """
    key = joining.extract_request_key(request.request_pem)
    try:
        secret = bytes.fromhex(request.secret)
    except ValueError as error:
        raise JoinRefused("the token is malformed: copy it again") from error
    use = TokenUse(name=request.name, key=sha256(joining.encode_public_key(key)).hexdigest())
    now_s = clock()
    if not abs(request.unix_s - now_s) <= CLOCKS_DIFFER_S:
        raise JoinRefused(
            f"the clock of {request.name} is {abs(request.unix_s - now_s) / 3600:.0f} h off "
            "the control unit's: set both (`timedatectl`)"
        )
    with registry.lock():
        member = _describe_member(request)
        token = registry.tokens.find_usable(secret, use, now_s)
        if other := explain_version(request.name, request.version, "the control unit"):
            raise JoinRefused(other)
        config = registry.cluster(token.cluster_id)
        if member.dials:
            member = _place_dialler(config, token.role, member)
        try:
            certificate = _find_certificate(registry, config, token.role, member, key)
            if request.only_asks:
                return None
            hosts = list_hosts(member, token.role)
            certificate = certificate or registry.certify(member.name, hosts, key)
            registry.tokens.redeem(token, use)  # not where the member is refused
            member = replace(member, fingerprint=fingerprint(certificate))
            if request.speed_flop_per_s > 0:  # before a roster with the member is sent
                measured = Measured(
                    name=request.name,
                    address=request.address,
                    speed_flop_per_s=request.speed_flop_per_s,
                    overhead_s=request.overhead_s,
                    memory_bytes=request.memory_bytes or None,
                )
                note_figures(config, [measured])
            config = registry.admit(config, token.role, member)
        except ConfigError as error:
            raise JoinRefused(str(error)) from error
        return joining.JoinAnswer(
            cluster_id=config.id,
            role=token.role.value,
            certificate_pem=certificate.decode(),
            roster=registry.roster(config),
        )


def _describe_member(request: joining.JoinRequest) -> MemberConfig:
    """Describe the newcomer as the roster will list it."""
    kind = request.kind or MemberConfig().kind
    address = "" if request.dials else request.address
    member = MemberConfig(name=request.name, address=address, dials=request.dials, kind=kind)
    try:
        check_keys(member, "")
        device_preset(kind)
    except ConfigError as error:
        raise JoinRefused(str(error)) from error
    return member


def _place_dialler(config: ClusterConfig, role: Role, member: MemberConfig) -> MemberConfig:
    """Give the newcomer the address where its control unit relays. Raises JoinRefused."""
    if role is not Role.DEVICE:
        raise JoinRefused(
            f"{_name_role(role)} must be reached: join without --dial, with --address HOST:PORT"
        )
    if not config.relay_address:
        raise JoinRefused(
            f"the control unit of {config.id} has not joined yet, through which {member.name} "
            "would be reached: let that join first"
        )
    return replace(member, address=config.relay_address)


def _find_registered(config: ClusterConfig, role: Role, name: str) -> MemberConfig | None:
    return next((m for m in config.list_in_role(role) if m.name == name), None)


def _find_certificate(
    registry: Registry,
    config: ClusterConfig,
    role: Role,
    member: MemberConfig,
    key: ec.EllipticCurvePublicKey,
) -> bytes | None:
    """Return the member's certificate if it asks again; None where it needs another.

    Raises JoinRefused if another member has the name, the role or the address.
    """
    before, key_bytes = _find_registered(config, role, member.name), joining.encode_public_key(key)
    kept = registry.read_certificate(member.name)
    if before is not None and before.fingerprint:
        if kept is None or joining.extract_key(kept) != key_bytes:
            raise JoinRefused(
                f"{member.name} is a member of {config.id} already, with another key: choose "
                f"another name with --name, or first `collapipe cluster remove {member.name}`"
            )
        if before.address == member.address and not is_due(kept, datetime.now(UTC)):
            return kept
    elif registry.was_removed(member.name, key_bytes):
        raise JoinRefused(
            f"{member.name} was removed from {config.id}, and its key with it: join with --again, "
            "which makes another key"
        )
    _check_free(registry, config, role, member)
    return None


def _check_free(
    registry: Registry, config: ClusterConfig, role: Role, member: MemberConfig
) -> None:
    """Raise JoinRefused if another member has the role, the name or the address."""
    before = _find_registered(config, role, member.name)
    others = [m for c in registry.clusters().values() for m in c.members if m != before]
    if role is not Role.DEVICE:
        there = find_single(config, role)
        others = [m for m in others if m.name != there.name]
        if there.fingerprint and there.name != member.name:
            raise JoinRefused(f"{config.id} has {_name_role(role)} already: {there.name}")
    taken = next((m.name for m in others if m.name.casefold() == member.name.casefold()), None)
    if taken is not None:
        raise JoinRefused(f"another member is called {taken} already: choose another with --name")
    taken = next((m.name for m in others if m.address and m.address == member.address), None)
    if taken is not None and not member.dials:
        raise JoinRefused(
            f"{taken} of {config.id} is at {member.address} already: give this one an address of "
            "its own with --address"
        )
    if role is not Role.SERVER and not member.address:
        raise JoinRefused(f"{_name_role(role)} needs an address: give it with --address HOST:PORT")


def _name_role(role: Role) -> str:
    return f"{'an' if role is Role.EDGE else 'a'} {role.value}"


class JoinAttempts:
    """Counts recent refusals: by address, and of all callers together."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: deque[tuple[float, str]] = deque()
        self._lock = threading.Lock()

    def too_many(self, host: str) -> bool:
        with self._lock:
            while self._refused and self._refused[0][0] <= self._clock() - WITHIN_S:
                self._refused.popleft()
            own = sum(who == host for _, who in self._refused)
            return own >= MOST_REFUSALS or len(self._refused) >= MOST_OF_ALL

    def note(self, host: str) -> None:
        with self._lock:
            self._refused.append((self._clock(), host))


class JoiningService(Server):
    """Listens for newcomers of the clusters of a registry; calls ``on_joined`` with their names.

    Raises ConfigError where it cannot listen, or the folder has no CA.
    """

    def __init__(
        self,
        registry: Registry,
        listen: str,
        *,
        on_joined: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._registry, self._on_joined = registry, on_joined
        self._attempts = JoinAttempts()
        with registry.lock():
            files = registry.issue_service_files()
        super().__init__(
            listen,
            {joining.JOIN: self._join},
            threads=_AT_ONCE,
            most_calls=2 * _AT_ONCE,
            most_bytes=MESSAGE_BYTES,
            tls=files,
        )

    def _join(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        host = context.peer().partition(":")[2].rpartition(":")[0]  # of ipv4:10.0.0.11:4711
        if self._attempts.too_many(host):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"too many attempts were refused: try again in {WITHIN_S:g} s",
            )
        try:
            request = decode_message(joining.JoinRequest, take_message(messages, context))
            answer = admit(self._registry, request)
        except JoinRefused as error:
            self._refuse(context, host, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ProtocolError as error:
            why = str(error).partition(", got ")[0]  # the value may be a secret in the wrong field
            self._refuse(context, host, grpc.StatusCode.INVALID_ARGUMENT, why)
        except CollaPipeError as error:
            _log.error("newcomers cannot join: %s", error)
            context.abort(grpc.StatusCode.INTERNAL, "the control unit failed: see its log")
        if answer is None:
            return b""
        _log.info("%s joined %s as %s", request.name, answer.cluster_id, answer.role)
        self._on_joined(request.name)
        return encode_message(answer)

    def _refuse(
        self, context: grpc.ServicerContext, host: str, code: grpc.StatusCode, why: str
    ) -> None:
        self._attempts.note(host)
        _log.warning("a newcomer at %s was refused: %s", host, to_one_line(why))
        context.abort(code, why)
