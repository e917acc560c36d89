"""What every hop of a run carried, how it was coded, and how fast it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One direction of a hop.

    ``sending_s`` is how long what was sent kept the wire busy: as long as a pace or its transport
    held the sender back, and as both ends saw frames leave and arrive. Where only the sender knows
    (few frames), buffers take them at once and the rate is an upper bound.
    """

    bytes: int
    sending_s: float
    planned_bit_per_s: float | None = None  # None: not paced

    @property
    def bit_per_s(self) -> float | None:
        """Measured; None where nothing was timed, as on in-memory links without a pace."""
        return 8.0 * self.bytes / self.sending_s if self.sending_s > 0 else None

    def __add__(self, later: Direction) -> Direction:
        """Both together; the later plan counts."""
        return Direction(
            bytes=self.bytes + later.bytes,
            sending_s=self.sending_s + later.sending_s,
            planned_bit_per_s=later.planned_bit_per_s,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data with the measured rate."""
        return {
            "bytes": self.bytes,
            "sending_s": self.sending_s,
            "bit_per_s": self.bit_per_s,
            "planned_bit_per_s": self.planned_bit_per_s,
        }

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> Direction:
        """What :meth:`as_json` wrote."""
        return Direction(**{key: data[key] for key in ("bytes", "sending_s", "planned_bit_per_s")})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkReport:
    """One hop in one round, or in several; forward is towards the edge."""

    cluster_id: str
    sender: str
    receiver: str
    codec: str
    forward: Direction
    backward: Direction

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The same hop with the same codec."""
        return self.cluster_id, self.sender, self.receiver, self.codec

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        ways = {"forward": self.forward.as_json(), "backward": self.backward.as_json()}
        return {
            "cluster": self.cluster_id,
            "sender": self.sender,
            "receiver": self.receiver,
            "codec": self.codec,
            **ways,
        }

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> LinkReport:
        """What :meth:`as_json` wrote."""
        return LinkReport(
            cluster_id=data["cluster"],
            sender=data["sender"],
            receiver=data["receiver"],
            codec=data["codec"],
            forward=Direction.of_json(data["forward"]),
            backward=Direction.of_json(data["backward"]),
        )


def totals(links: Iterable[LinkReport]) -> tuple[LinkReport, ...]:
    """One entry per hop and codec, in order of first use."""
    found: dict[tuple[str, str, str, str], LinkReport] = {}
    for link in links:
        before = found.get(link.key)
        if before is not None:
            forward, backward = before.forward + link.forward, before.backward + link.backward
            link = replace(link, forward=forward, backward=backward)
        found[link.key] = link
    return tuple(found.values())


def link_row(link: Mapping[str, Any]) -> tuple[str, str]:
    """One line of a table from :meth:`LinkReport.as_json`: the hop, then codec and rates."""
    ends = " > ".join(str(link[end]).rpartition("/")[2] for end in ("sender", "receiver"))
    ways = " | ".join(_way(link[way]) for way in ("forward", "backward"))
    return f"link {link['cluster']} {ends}", f"{link['codec']}  {ways}"


def _way(way: Mapping[str, Any]) -> str:
    text = f"{way['bytes'] / 1e6:.1f} MB"
    if way["bit_per_s"] is not None:
        text += f" at {way['bit_per_s'] / 1e6:.4g}"
        if way["planned_bit_per_s"] is not None:
            text += f" of {way['planned_bit_per_s'] / 1e6:.4g}"
        text += " Mbit/s"
    return text
