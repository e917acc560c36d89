"""Joules that sessions use here, by the sensor that this machine has; modelled where it has none.

A sensor sees the whole machine. Sessions that run at the same time share what it counts.
A sensor that fails, stands still, or tells what no board can use, loses the interval that it
was to meter and nothing else: that energy is then modelled from measured times.
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
SENSORS = {  # the first that answers is taken; what each needs
    "ina3221": "a Jetson has it under /sys/class/hwmon",
    "pi5-pmic": "a Raspberry Pi 5 has it; put this user into the group video",
    "rapl": "let this user read energy_uj under /sys/class/powercap",
}
MOST_W = 2000.0  # of any machine that this is for
_MOST_PERIODS = 6  # that a sensor may miss within an interval
_LEAST_S = 0.005  # between two looks, for counters that advance every millisecond
_LOOK_S = 0.05  # for one figure of power


@dataclass(slots=True)
class Interval:
    """``joules`` of a stretch of time, from its end on; None if they were not metered."""

    joules: float | None = None


@dataclass(slots=True)
class _Open:
    """An interval that is being metered."""

    joules: float = 0.0
    lost: bool = False


class EnergyMeter:
    """Meters intervals, which may overlap, by ``sensor`` (None: by none)."""

    def __init__(
        self, sensor: Sensor | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sensor = sensor
        self._clock = clock
        self._lock = threading.Lock()
        self._open: list[_Open] = []
        self._last: tuple[float, Reading] | None = None
        self._idle = threading.Event()

    @property
    def name(self) -> str:
        """Of the sensor; empty without one."""
        return "" if self._sensor is None else self._sensor.name

    @contextmanager
    def interval(self) -> Iterator[Interval]:
        """Meter the body."""
        told = Interval()
        if self._sensor is None:
            yield told
            return
        mine = self._begin(self._sensor)
        try:
            yield told
        finally:
            told.joules = self._finish(mine, self._sensor)

    def power_w(self) -> float | None:
        """Now; None where it cannot be read."""
        if self._sensor is None:
            return None
        try:
            before, start_s = self._sensor.read(), self._clock()
            time.sleep(_LOOK_S)
            after, elapsed_s = self._sensor.read(), self._clock() - start_s
            joules = self._sensor.joules(before, after, elapsed_s)
        except (OSError, ValueError):
            return None
        return joules / elapsed_s if _is_believable(joules, elapsed_s) else None

    def _begin(self, sensor: Sensor) -> _Open:
        mine = _Open()
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
        return mine

    def _finish(self, mine: _Open, sensor: Sensor) -> float | None:
        with self._lock:
            seen = self._look(sensor)
            self._open.remove(mine)
            if not self._open:
                self._idle.set()
        return mine.joules if seen and not mine.lost else None

    def _watch(self, sensor: Sensor, idle: threading.Event) -> None:
        """Look while any interval is open: power changes, and counters start again."""
        while not idle.wait(sensor.period_s):
            with self._lock:
                if not idle.is_set():
                    self._look(sensor)

    def _look(self, sensor: Sensor) -> bool:
        """Share what was used since the last look; False if the sensor cannot be believed."""
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
        joules = self._joules(sensor, before, now, elapsed_s)
        if joules is None and not missed:
            return False  # the next look covers this one's time
        self._last = now
        for each in self._open:
            each.lost = each.lost or missed or joules is None
            each.joules += (joules or 0.0) / len(self._open)
        return joules is not None

    def _read(self, sensor: Sensor) -> tuple[float, Reading] | None:
        try:
            return self._clock(), sensor.read()
        except (OSError, ValueError):
            return None

    @staticmethod
    def _joules(
        sensor: Sensor, before: tuple[float, Reading], now: tuple[float, Reading], elapsed_s: float
    ) -> float | None:
        try:
            joules = sensor.joules(before[1], now[1], elapsed_s)
        except ValueError:
            return None
        return joules if _is_believable(joules, elapsed_s) else None


def _is_believable(joules: float, elapsed_s: float) -> bool:
    return 0 < joules <= MOST_W * elapsed_s < math.inf


def energy_meter(name: str, *, root: Path = SYSFS, vcgencmd: str = VCGENCMD) -> EnergyMeter:
    """By the sensor of that name, `AUTO` (the first that can be read, if any) or `NONE`.

    Raises ConfigError for another name, and where the named sensor cannot be read.
    """
    if name not in (AUTO, NONE, *SENSORS):
        names = ", ".join((AUTO, NONE, *SENSORS))
        raise ConfigError(f"--energy-sensor must be one of {names}, got {name!r}")
    if name == NONE:
        return EnergyMeter()
    sensors: tuple[Sensor, ...] = (Ina3221(root), Pi5Pmic(vcgencmd), Rapl(root))
    for sensor in sensors:
        meter = EnergyMeter(sensor)
        if name in (AUTO, sensor.name) and meter.power_w() is not None:
            return meter
    if name == AUTO:
        return EnergyMeter()
    raise ConfigError(
        f"--energy-sensor {name} tells no power here: {SENSORS[name]}, or leave the option out"
    )
