"""What a host is asked before anybody works with it: memory, clock, and its ways to others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.imports import version_of

_KIB = 1024
_MOST_PAYLOAD_BYTES = 16 * 2**20
_MOST_DEADLINE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """``resident_bytes`` is the daemon's own memory (0: not known), ``unix_s`` its clock.

    It is ``awake`` when it has loaded the libraries of models, and opens no session any more when
    it is ``stopping``. Its ``energy_sensor`` (empty: none) told ``power_w``. ``rosters`` are the
    versions of its cluster files by cluster id.
    """

    resident_bytes: int
    awake: bool
    stopping: bool
    unix_s: float
    version: str
    energy_sensor: str = ""
    power_w: float | None = None
    rosters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """The host to try; it must prove `certificate_name` under TLS (empty: its address)."""

    name: str
    address: str
    certificate_name: str = ""
    payload_bytes: int = 4 * 2**20
    deadline_s: float = 10.0

    def __post_init__(self) -> None:
        for name, most in (
            ("payload_bytes", _MOST_PAYLOAD_BYTES),
            ("deadline_s", _MOST_DEADLINE_S),
        ):
            if not 0 < (value := getattr(self, name)) <= most:
                raise ConfigError(f"{name} of a probe must be > 0 and <= {most}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """Of one way, there; `delay_s` is half a round trip of an empty message."""

    rate_bit_per_s: float
    delay_s: float


def status_here(
    *, awake: bool, stopping: bool, rosters: Mapping[str, int] | None = None
) -> HostStatus:
    """Of this process."""
    return HostStatus(
        resident_bytes=_resident_bytes(),
        awake=awake,
        stopping=stopping,
        unix_s=time.time(),
        version=version_of("collapipe-flwr"),
        rosters=rosters or {},
    )


def _resident_bytes() -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(li.split()[1]) * _KIB for li in lines if li.startswith("VmRSS:")), 0)
