"""What `collapipe cluster check` found out about the members of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError, ProtocolError
from collapipe_flwr.core.json_codec import from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One member; a figure is None where it was not measured, ``fault`` is empty if all is well.

    ``speed_flop_per_s`` is that of forward and backward passes of one block, ``rate_bit_per_s``
    and ``delay_s`` (one way) those of the link from the control unit. ``idle_bytes`` is what its
    daemon held before the check had it load anything, ``clock_ahead_s`` how far its clock is ahead
    of the control unit's.
    """

    name: str
    address: str = ""
    speed_flop_per_s: float | None = None
    memory_bytes: int | None = None
    rate_bit_per_s: float | None = None
    delay_s: float | None = None
    idle_bytes: int | None = None
    clock_ahead_s: float | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """The way from one device to another, or to the edge; ``delay_s`` is one way."""

    source: str
    target: str
    rate_bit_per_s: float | None = None
    delay_s: float | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All members of one cluster, in the order of its file, and the links between them.

    ``links_left_out`` counts links of a large cluster that the check did not try.
    """

    cluster_id: str
    members: tuple[Measured, ...]
    links: tuple[MeasuredLink, ...] = ()
    links_left_out: int = 0

    @property
    def faults(self) -> tuple[str, ...]:
        """One sentence per member or link that needs mending."""
        return (
            *(f"{m.name}: {m.fault}" for m in self.members if m.fault),
            *(f"{link.source} -> {link.target}: {link.fault}" for link in self.links if link.fault),
        )

    def of(self, name: str) -> Measured:
        """What is known of a member; nothing, if it was not there."""
        return next((m for m in self.members if m.name == name), Measured(name=name))


def read_measurements(path: Path) -> Measurements:
    """What an earlier check wrote; raises ConfigError with the way to write it anew."""
    try:
        return from_json(Measurements, path.read_text(), path.name)
    except (OSError, UnicodeDecodeError, ProtocolError) as error:
        raise ConfigError(
            f"measured figures {path} cannot be used ({error}): write them with "
            f"`collapipe cluster check FILE --json {path.name}`"
        ) from error
