"""Joules that sessions use, by this machine's power sensor; modelled where it has none.

A sensor sees the whole machine, so sessions that run at the same time share what it counts. A
sensor that fails, stands still or reads an impossible value loses only the interval in which it
does so: that energy is then modelled from measured times.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.host.energy_sensors import (
    SYSFS,
    VCGENCMD,
    Ina3221,
    Pi5Pmic,
    Rapl,
    Reading,
    Sensor,
)

AUTO, NONE = "auto", "none"
SENSORS = {  # what each needs; in the order in which they are tried
    "ina3221": "a Jetson has it under /sys/class/hwmon",
    "pi5-pmic": "a Raspberry Pi 5 has it; put this user into the group video",
    "rapl": "let this user read energy_uj under /sys/class/powercap",
}
MOST_W = 2000.0  # a machine that uses more is not one that this package is for
_MOST_PERIODS = 6  # that a sensor may miss within an interval
_LEAST_S = 0.005  # between two looks, for counters that advance every millisecond
_LOOK_S = 0.05  # for one figure of power


@dataclass(slots=True, eq=False)
class Interval:
    """A stretch of time; ``joules`` from its end on, None if they were not metered."""

    joules: float | None = None
    so_far: float = 0.0
    lost: bool = False  # the sensor failed within


class EnergyMeter:
    """Meters intervals, which may overlap, by ``sensor`` (None: by none)."""

    def __init__(
        self, sensor: Sensor | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sensor = sensor
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[Interval] = []
        self._last: tuple[float, Reading] | None = None
        self._idle = threading.Event()

    @property
    def name(self) -> str:
        """The sensor's; empty without one."""
        return "" if self._sensor is None else self._sensor.name

    @contextmanager
    def interval(self) -> Iterator[Interval]:
        """Meter the body."""
        mine, sensor = Interval(), self._sensor
        if sensor is None:
            yield mine
            return
        self._begin(mine, sensor)
        try:
            yield mine
        finally:
            with self._lock:
                seen = self._look(sensor)
                self._open.remove(mine)
                if not self._open:
                    self._idle.set()
            mine.joules = mine.so_far if seen and not mine.lost else None

    def power_w(self) -> float | None:
        """Now; None where it cannot be read."""
        if self._sensor is None or (before := self._read(self._sensor)) is None:
            return None
        time.sleep(_LOOK_S)
        if (after := self._read(self._sensor)) is None:
            return None
        elapsed_s = after[0] - before[0]
        joules = _joules(self._sensor, before[1], after[1], elapsed_s)
        return None if joules is None else joules / elapsed_s

    def _begin(self, mine: Interval, sensor: Sensor) -> None:
        with self._lock:
            if self._open:
                mine.lost = not self._look(sensor)
            else:
                self._last = self._read(sensor)
                mine.lost = self._last is None
                self._idle = threading.Event()
                threading.Thread(
                    target=self._watch, args=(sensor, self._idle), name="energy", daemon=True
                ).start()
            self._open.append(mine)

    def _watch(self, sensor: Sensor, idle: threading.Event) -> None:
        """Look while any interval is open: power changes, and counters start again."""
        while not idle.wait(sensor.period_s):
            with self._lock:
                if not idle.is_set():
                    self._look(sensor)

    def _look(self, sensor: Sensor) -> bool:
        """Share what was used since the last look; False if the reading is not believable."""
        now, before = self._read(sensor), self._last
        if now is None:
            return False
        if before is None:
            self._last = now
            return True
        elapsed_s = now[0] - before[0]
        if elapsed_s < _LEAST_S:
            return True
        missed = elapsed_s > _MOST_PERIODS * sensor.period_s
        joules = _joules(sensor, before[1], now[1], elapsed_s)
        if joules is None and not missed:
            return False  # the next look covers this one's time
        self._last = now
        for each in self._open:
            each.lost = each.lost or missed or joules is None
            each.so_far += (joules or 0.0) / len(self._open)
        return joules is not None

    def _read(self, sensor: Sensor) -> tuple[float, Reading] | None:
        try:
            return self._clock(), sensor.read()
        except (OSError, ValueError):
            return None


def _joules(sensor: Sensor, before: Reading, after: Reading, elapsed_s: float) -> float | None:
    """Used in between; None where no machine could have used it."""
    try:
        joules = sensor.joules(before, after, elapsed_s)
    except ValueError:
        return None
    return joules if 0 < joules <= MOST_W * elapsed_s < math.inf else None


def energy_meter(name: str, *, root: Path = SYSFS, vcgencmd: str = VCGENCMD) -> EnergyMeter:
    """A meter by the named sensor, by `AUTO` (the first that can be read, if any) or `NONE`.

    Raises ConfigError for another name, and where the named sensor cannot be read.
    """
    if name not in (AUTO, NONE, *SENSORS):
        names = ", ".join((AUTO, NONE, *SENSORS))
        raise ConfigError(f"--energy-sensor must be one of {names}, got {name!r}")
    sensors: tuple[Sensor, ...] = (Ina3221(root), Pi5Pmic(vcgencmd), Rapl(root))
    for sensor in sensors:
        meter = EnergyMeter(sensor)
        if name in (AUTO, sensor.name) and meter.power_w() is not None:
            return meter
    if name in (AUTO, NONE):
        return EnergyMeter()
    raise ConfigError(
        f"--energy-sensor {name} tells no power here: {SENSORS[name]}, or leave the option out"
    )
