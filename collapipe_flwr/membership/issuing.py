"""Making tokens, where the cluster is kept."""

from __future__ import annotations

import time
from collections.abc import Callable

from collapipe_flwr.config.access_control import Role
from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.membership.registry import Registry
from collapipe_flwr.membership.tokens import JoinToken, KnownToken, new_secret
from collapipe_flwr.transport.tls import fingerprint


def new_token(
    registry: Registry,
    config: ClusterConfig,
    role: Role,
    *,
    members: int,
    minutes: float,
    clock: Callable[[], float] = time.time,
) -> JoinToken:
    """A token by which so many members may join in a role; under the registry's lock.

    Raises ConfigError where the cluster file does not say where newcomers are let in.
    """
    if not config.joining_address:
        raise ConfigError(
            f"{config.path} has no address of the control unit, where newcomers are let in"
        )
    token = JoinToken(
        cluster_id=config.id,
        address=config.joining_address,
        pin=bytes.fromhex(fingerprint(registry.ca.read_bytes())),
        secret=new_secret(),
        role=role,
    )
    now_s = clock()
    registry.tokens.add(
        token.secret,
        KnownToken(
            digest="",
            cluster_id=config.id,
            role=role,
            members=members,
            made_s=now_s,
            ends_s=now_s + 60.0 * minutes,
        ),
    )
    return token
