"""Which fault strikes whom and when in a soak: all kinds on all roles in turn, in a drawn order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

EVERY_S = 60.0
LASTS_S = 20.0  # hang, cut and slow
KILL, HANG, CUT, SLOW = KINDS = ("kill", "hang", "cut", "slow")
DEVICE, EDGE, UNIT, NODE, LINK, APP = (
    "device",
    "edge",
    "control unit",
    "SuperNode",
    "SuperLink",
    "ServerApp",
)
UNIT_HOST, SERVER_HOST = "control unit's host", "server's host"
COMBINATIONS = (
    *((role, kind) for role in (DEVICE, EDGE) for kind in KINDS),
    *((role, kind) for role in (UNIT, NODE, LINK, APP) for kind in (KILL, HANG)),
    *((role, kind) for role in (UNIT_HOST, SERVER_HOST) for kind in (CUT, SLOW)),
)
_CENTRAL = (EDGE, LINK, APP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Strikes ``host`` so many seconds after the first round; ``role`` is who is meant there."""

    at_s: float
    role: str
    kind: str
    host: str


def schedule(seed: int, duration_s: float, clusters: Sequence[Sequence[str]]) -> list[Fault]:
    """A fault per minute but the last; all combinations occur before one occurs again.

    What is killed in a cluster is killed in the first, so the others' processes live from begin to
    end. Edge, SuperLink and ServerApp are killed in the first half only, so that their last
    processes live through the last half, over which growth is judged.
    """
    random, waiting, found = Random(seed), [], []
    for number in range(1, int(duration_s // EVERY_S)):
        at_s = number * EVERY_S
        is_late = at_s > duration_s / 2 - EVERY_S
        if not any(_fits(each, is_late) for each in waiting):
            waiting = list(COMBINATIONS)
            random.shuffle(waiting)
        role, kind = next(each for each in waiting if _fits(each, is_late))
        waiting.remove((role, kind))
        host = _host(role, clusters[0] if kind == KILL else random.choice(clusters), random)
        found.append(Fault(at_s=at_s, role=role, kind=kind, host=host))
    return found


def _fits(combination: tuple[str, str], is_late: bool) -> bool:
    role, kind = combination
    return not (is_late and kind == KILL and role in _CENTRAL)


def _host(role: str, cluster: Sequence[str], random: Random) -> str:
    if role == DEVICE:
        return random.choice(cluster)
    if role in (UNIT, NODE, UNIT_HOST):
        return f"cu-{cluster[0][0]}"
    return "edge" if role == EDGE else "server"
