"""Joules that this machine has used, by its own counters; off by default.

A counter sees the whole machine: other programs, its idle power, and every session of a host that
has several. Where that would mislead, leave it off: energy is then modelled from measured times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError

ReadJoules = Callable[[], float | None]
"""Joules since some moment; None while the sensor cannot be read."""
SENSORS = ("rapl",)
POWERCAP = Path("/sys/class/powercap")


class Rapl:
    """The processor packages of Linux' powercap (``intel-rapl:0``, ...; AMD's have the same names).

    Each counts microjoules and starts again at its ``max_energy_range_uj``.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        zones = sorted(root.glob("intel-rapl:*"))
        self._zones = [zone for zone in zones if zone.name.count(":") == 1]
        self._last: dict[Path, int] = {}
        self._total_uj = 0
        if not self._zones or self() is None:
            raise ConfigError(
                f"--energy-sensor rapl: no counter under {root} can be read: give this user the "
                "right to read energy_uj there, or leave the option out"
            )

    def __call__(self) -> float | None:
        """See `ReadJoules`."""
        try:
            for zone in self._zones:
                now = int((zone / "energy_uj").read_text())
                most = int((zone / "max_energy_range_uj").read_text())
                self._total_uj += (now - self._last.get(zone, now)) % (most + 1)
                self._last[zone] = now
        except (OSError, ValueError):
            return None
        return self._total_uj / 1e6


def energy_sensor(name: str) -> ReadJoules | None:
    """The sensor of that name, None without a name; raises ConfigError where it cannot be read."""
    if not name:
        return None
    if name not in SENSORS:
        raise ConfigError(f"--energy-sensor must be one of {', '.join(SENSORS)}, got {name!r}")
    return Rapl()
