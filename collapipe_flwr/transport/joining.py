"""The one call of a machine that has no certificate yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from collapipe_flwr.transport.methods import Method
from collapipe_flwr.transport.roster import Roster

JOIN = Method("Join", service="collapipe.Joining")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """Who asks to be let in; figures of 0 were not measured, ``kind`` may be empty.

    ``address`` is where it listens (empty: nowhere), ``unix_s`` its clock.
    """

    secret: str = field(repr=False)  # of its token, in hexadecimal
    name: str
    request_pem: str
    unix_s: float
    address: str = ""
    kind: str = ""
    speed_flop_per_s: float = 0.0
    overhead_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """The newcomer's certificate, and the roster of the cluster that it is a member of now."""

    cluster_id: str
    role: str
    certificate_pem: str
    roster: Roster
