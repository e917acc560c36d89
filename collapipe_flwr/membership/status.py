"""Who is in a cluster, and who of them is there now."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from collapipe_flwr.cluster.profile import Measurements
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, Role
from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.membership.figures import figures_of
from collapipe_flwr.membership.herald import connection_to
from collapipe_flwr.transport.methods import STATUS, HostStatus

_DEADLINE_S = 2.0
_AT_ONCE = 32
READY, STOPPING, AWAY, EXPECTED = "ready", "stopping", "away", "has not joined"
BEHIND = "behind"  # it has an older roster, for another moment


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """``state`` is one of the words above; ``fault`` says why a member is away.

    ``roster`` is the version that it goes by (None: not known), ``resident_bytes`` its daemon's
    memory; speed and memory are those by which it is planned, None where it was not measured.
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
        """Whether everybody is there, and up to date."""
        return all(member.state == READY for member in self.members)


def cluster_status(config: ClusterConfig, clock: Callable[[], float] = time.time) -> ClusterStatus:
    """Ask all at once: devices, edge, and a control unit that is on a machine of its own."""
    members = [(device, Role.DEVICE) for device in config.devices]
    if config.edge.address or config.version:
        members.append((config.edge, Role.EDGE))
    if config.joining:
        members.append((config.control_unit, Role.CONTROL_UNIT))
    known = figures_of(config)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="status") as pool:
        ask = partial(_status, config, known, clock)
        found = tuple(pool.map(ask, *zip(*members, strict=True))) if members else ()
    return ClusterStatus(cluster_id=config.id, version=config.version, members=found)


def _status(
    config: ClusterConfig,
    known: Measurements,
    clock: Callable[[], float],
    member: MemberConfig,
    role: Role,
) -> MemberStatus:
    measured = known.of(member.name)
    speed = member.speed_gflop_per_s * 1e9 or measured.speed_flop_per_s
    memory = int(member.memory_mb * 1e6) or measured.memory_bytes

    def told(state: str, fault: str = "", found: HostStatus | None = None) -> MemberStatus:
        return MemberStatus(
            name=member.name,
            role=role.value,
            address=member.address,
            state=state,
            roster=found.rosters.get(config.id) if found else None,
            speed_flop_per_s=speed,
            memory_bytes=memory,
            resident_bytes=found.resident_bytes if found else None,
            clock_ahead_s=found.unix_s - clock() if found else None,
            fault=fault,
        )

    if not member.address or (config.version and not member.fingerprint):
        return told(EXPECTED)
    try:
        with connection_to(config, member, _DEADLINE_S) as connection:
            found = connection.call(STATUS, answer=HostStatus)
    except LinkError as error:
        return told(AWAY, str(error))
    behind = config.version > 0 and found.rosters.get(config.id) != config.version
    return told(STOPPING if found.stopping else BEHIND if behind else READY, found=found)
