"""Letting newcomers in: the token, the name, the certificate, the roster, in an order that holds.

A token's use is noted first, so that whatever ends this process no token lets in more members than
it was made for. A newcomer that did not hear the answer asks again with the same key, and gets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric import ec

from collapipe_flwr.cluster.profile import Measured
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, Role
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import check_keys
from collapipe_flwr.membership.figures import note_figures
from collapipe_flwr.membership.registry import Registry, hosts_of, member_in
from collapipe_flwr.membership.tokens import JoinRefused, TokenUse
from collapipe_flwr.simulation.devices import device_preset
from collapipe_flwr.transport.joining import (
    JoinAnswer,
    JoinRequest,
    key_in_certificate,
    key_in_request,
    public_bytes,
)
from collapipe_flwr.transport.tls import fingerprint

CLOCKS_DIFFER_S = 12 * 3600.0  # certificates hold from a day before they were made


def admit(
    registry: Registry, request: JoinRequest, clock: Callable[[], float] = time.time
) -> JoinAnswer:
    """Make the bearer of a token a member. Raises JoinRefused, with a sentence for its screen."""
    key = key_in_request(request.request_pem)
    use = TokenUse(name=request.name, key=sha256(public_bytes(key)).hexdigest())
    now_s = clock()
    if not abs(request.unix_s - now_s) <= CLOCKS_DIFFER_S:
        raise JoinRefused(
            f"the clock of {request.name[:80]} is {abs(request.unix_s - now_s) / 3600:.0f} h off "
            "the control unit's: set both (`timedatectl`)"
        )
    with registry.changing():
        member = _member(request)  # what is malformed must not use up a token
        token = registry.tokens.redeem(_secret(request), use, now_s)
        config = registry.cluster(token.cluster_id)
        try:
            certificate = _certificate(registry, config, token.role, member, key)
            member = replace(member, fingerprint=fingerprint(certificate))
            if request.speed_flop_per_s > 0:  # before a roster can tell of it
                note_figures(config, [_measured(request)])
            if _registered(config, token.role, member.name) != member:
                config = registry.admit(config, token.role, member)
        except ConfigError as error:
            raise JoinRefused(str(error)) from error
        return JoinAnswer(
            cluster_id=config.id,
            role=token.role.value,
            certificate_pem=certificate.decode(),
            roster=registry.roster(config),
        )


def _secret(request: JoinRequest) -> bytes:
    try:
        return bytes.fromhex(request.secret)
    except ValueError as error:
        raise JoinRefused("the token is malformed: copy it again") from error


def _member(request: JoinRequest) -> MemberConfig:
    """As it will stand in the roster."""
    kind = request.kind or MemberConfig().kind
    member = MemberConfig(name=request.name, address=request.address, kind=kind)
    try:
        check_keys(member, "")
        device_preset(kind)
    except ConfigError as error:
        raise JoinRefused(str(error)) from error
    return member


def _registered(config: ClusterConfig, role: Role, name: str) -> MemberConfig | None:
    members = config.devices if role is Role.DEVICE else (member_in(config, role),)
    return next((m for m in members if m.name == name), None)


def _certificate(
    registry: Registry,
    config: ClusterConfig,
    role: Role,
    member: MemberConfig,
    key: ec.EllipticCurvePublicKey,
) -> bytes:
    """The one that it has already, where it asks again; else a new one.

    Raises JoinRefused where somebody else has the name, the role or the address.
    """
    before, key_bytes = _registered(config, role, member.name), public_bytes(key)
    kept = registry.certified(member.name)
    if before is not None and before.fingerprint:
        if kept is None or key_in_certificate(kept) != key_bytes:
            raise JoinRefused(
                f"{member.name} is a member of {config.id} already, with another key: choose "
                f"another name with --name, or first `collapipe cluster remove {member.name}`"
            )
        if before.address == member.address:
            return kept
    if not (before and before.fingerprint) and registry.was_removed(member.name, key_bytes):
        raise JoinRefused(
            f"{member.name} was removed from {config.id}, and its key with it: join with --again, "
            "which makes another key"
        )
    _check_free(registry, config, role, member)
    return registry.certify(member.name, hosts_of(member, role), key)


def _check_free(
    registry: Registry, config: ClusterConfig, role: Role, member: MemberConfig
) -> None:
    """Raise JoinRefused where somebody else has the role, the name or the address."""
    before = _registered(config, role, member.name)
    others = [m for c in registry.clusters().values() for m in c.members if m != before]
    if role is not Role.DEVICE:
        there = member_in(config, role)
        others = [m for m in others if m.name != there.name]
        if there.fingerprint and there.name != member.name:
            raise JoinRefused(f"{config.id} has {_one(role)} already: {there.name}")
    taken = next((m.name for m in others if m.name.casefold() == member.name.casefold()), None)
    if taken is not None:
        raise JoinRefused(f"another member is called {taken} already: choose another with --name")
    taken = next((m.name for m in others if m.address and m.address == member.address), None)
    if taken is not None:
        raise JoinRefused(
            f"{taken} of {config.id} is at {member.address} already: give this one an address of "
            "its own with --address"
        )
    if role is not Role.SERVER and not member.address:
        raise JoinRefused(f"{_one(role)} needs an address: give it with --address HOST:PORT")


def _one(role: Role) -> str:
    return f"{'an' if role is Role.EDGE else 'a'} {role.value}"


def _measured(request: JoinRequest) -> Measured:
    return Measured(
        name=request.name,
        address=request.address,
        speed_flop_per_s=request.speed_flop_per_s,
        overhead_s=max(request.overhead_s, 0.0),
        memory_bytes=request.memory_bytes or None,
    )
