"""Energy of sessions in joules, metered by this machine's power sensor; modelled without one.

A sensor sees the whole machine, with its idle power and other programs. Sessions that run at the
same time share what it counts. Where a sensor fails, stands still or reads an impossible value,
only that interval is lost: its energy is modelled from measured times.

Roots and commands are parameters, so that tests can use a sysfs of their own.
"""

from __future__ import annotations

import math
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from collapipe_flwr.core.errors import ConfigError

AUTO, NONE = "auto", "none"
SENSORS = {  # requirements of each; in the order in which they are tried
    "ina3221": "a Jetson has it under /sys/class/hwmon",
    "pi5-pmic": "a Raspberry Pi 5 has it; put this user into the group video",
    "rapl": "let this user read energy_uj under /sys/class/powercap",
}
MOST_W = 2000.0  # readings above are impossible on machines that this package is for
_MOST_PERIODS = 6  # that a sensor may miss within an interval
_LEAST_S = 0.005  # between two looks, for counters that advance every millisecond
_LOOK_S = 0.05  # for one figure of power
SYSFS = Path("/sys")
VCGENCMD = "vcgencmd"
_VCGENCMD_S = 2.0
_TOTALS = ("VDD_IN", "POM_5V_IN")  # of Orin NX and Nano, Xavier NX; of the first Nano
_FED = ("VDDQ_VDD2_1V8AO",)  # of AGX Orin: fed by VIN_SYS_5V0
_UNUSED = ("", "NC")
_RAIL = re.compile(r"^\s*(\w+)_[AV] (?:current|volt)\(\d+\)=([-.\w]+)([AV])\s*$", re.MULTILINE)
Reading = tuple[float, ...]  # of one sensor, which alone knows what it means


class Sensor:
    """A sensor to `read` every ``period_s``; readings much further apart than that are useless.

    ``name`` is the value of `--energy-sensor`. Readings are watts, unless a class says otherwise.
    """

    name: ClassVar[str]
    period_s: ClassVar[float]

    def read(self) -> Reading:
        """Read the sensor once; raises OSError or ValueError where there is nothing to read."""
        raise NotImplementedError

    def measure_joules(self, before: Reading, after: Reading, elapsed_s: float) -> float:
        """Return the energy used between two readings: their mean times the time."""
        return (sum(before) + sum(after)) / 2 * elapsed_s


@dataclass(frozen=True, slots=True)
class Rapl(Sensor):
    """Processor packages and their memory by Linux' powercap, which names AMD's the same.

    Each zone counts microjoules and starts again after its ``max_energy_range_uj``, on a large
    processor within minutes. The zone of the whole platform (psys) would count the packages twice.
    """

    name = "rapl"
    period_s = 5.0
    root: Path = SYSFS

    def read(self) -> Reading:
        """Read counter and range of every zone, in uJ."""
        found = [
            float(int((zone / file).read_text()))
            for zone in self._list_zones()
            for file in ("energy_uj", "max_energy_range_uj")
        ]
        if not found:
            raise OSError("no zone of a processor package")
        return tuple(found)

    def measure_joules(self, before: Reading, after: Reading, elapsed_s: float) -> float:
        del elapsed_s
        if len(before) != len(after):
            raise ValueError("a zone came or went")
        counters = zip(before[::2], after[::2], after[1::2], strict=True)
        return sum((now - then) % (most + 1) for then, now, most in counters) / 1e6

    def _list_zones(self) -> Iterator[Path]:
        for zone in sorted((self.root / "class/powercap").glob("intel-rapl:*")):
            label = _read_text(zone / "name")
            is_package = zone.name.count(":") == 1 and label != "psys"
            if is_package or label == "dram":
                yield zone


@dataclass(frozen=True, slots=True)
class Ina3221(Sensor):
    """A Jetson's monitors: the rail that feeds the module, else all rails not fed by another."""

    name = "ina3221"
    period_s = 0.5
    root: Path = SYSFS

    def read(self) -> Reading:
        """Read the watts of each rail."""
        watts = dict(self._read_watts())
        total = [watts[label] for label in _TOTALS if label in watts]
        found = total[:1] or [value for label, value in watts.items() if label not in _FED]
        if not found:
            raise OSError("no rail of an INA3221")
        return tuple(found)

    def _read_watts(self) -> Iterator[tuple[str, float]]:
        for monitor in sorted((self.root / "class/hwmon").glob("hwmon*")):
            if _read_text(monitor / "name") != "ina3221":
                continue
            for label in sorted(monitor.glob("in[0-9]_label")):
                rail, number = _read_text(label), label.name[2]
                current = monitor / f"curr{number}_input"
                if rail in _UNUSED or not current.exists():  # unused, or the sum of shunt voltages
                    continue
                millivolt = int((monitor / f"in{number}_input").read_text())
                yield rail, millivolt * int(current.read_text()) / 1e6


@dataclass(frozen=True, slots=True)
class Pi5Pmic(Sensor):
    """The rails behind a Raspberry Pi 5's power chip, without what hangs on its USB ports."""

    name = "pi5-pmic"
    period_s = 1.0
    command: str = VCGENCMD

    def read(self) -> Reading:
        """Read the watts of each rail."""
        try:
            text = subprocess.run(
                [self.command, "pmic_read_adc"],
                capture_output=True,
                text=True,
                timeout=_VCGENCMD_S,
                check=True,
            ).stdout
        except subprocess.SubprocessError as error:
            raise OSError(f"{self.command}: {error}") from error
        found = {(rail, unit): float(value) for rail, value, unit in _RAIL.findall(text)}
        rails = [rail for rail, unit in found if unit == "A" and (rail, "V") in found]
        watts = [found[rail, "A"] * found[rail, "V"] for rail in rails]
        if not watts:
            raise ValueError(f"{self.command} pmic_read_adc reports no currents")
        return tuple(watts)


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@dataclass(slots=True, eq=False)
class Interval:
    """A stretch of time; ``joules`` from its end on, None if they were not metered."""

    joules: float | None = None
    so_far: float = 0.0
    lost: bool = False  # the sensor failed within


class EnergyMeter:
    """Meters intervals, which may overlap, by ``sensor`` (None: nothing is metered)."""

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
        """The name of the sensor; empty without one."""
        return "" if self._sensor is None else self._sensor.name

    @contextmanager
    def meter_interval(self) -> Iterator[Interval]:
        """Meter the body."""
        mine, sensor = Interval(), self._sensor
        if sensor is None:
            yield mine
            return
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
        try:
            yield mine
        finally:
            with self._lock:
                seen = self._look(sensor)
                self._open.remove(mine)
                if not self._open:
                    self._idle.set()
            mine.joules = mine.so_far if seen and not mine.lost else None

    def measure_power_w(self) -> float | None:
        """Measure the power that is drawn now; None where it cannot be read."""
        if self._sensor is None or (before := self._read(self._sensor)) is None:
            return None
        time.sleep(_LOOK_S)
        if (after := self._read(self._sensor)) is None:
            return None
        elapsed_s = after[0] - before[0]
        joules = _compute_joules(self._sensor, before[1], after[1], elapsed_s)
        return None if joules is None else joules / elapsed_s

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
        joules = _compute_joules(sensor, before[1], now[1], elapsed_s)
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


def _compute_joules(
    sensor: Sensor, before: Reading, after: Reading, elapsed_s: float
) -> float | None:
    """Return the energy used between two readings; None where the value is impossible."""
    try:
        joules = sensor.measure_joules(before, after, elapsed_s)
    except ValueError:
        return None
    return joules if 0 < joules <= MOST_W * elapsed_s < math.inf else None


def make_energy_meter(name: str, *, root: Path = SYSFS, vcgencmd: str = VCGENCMD) -> EnergyMeter:
    """Make a meter with the named sensor, `AUTO` (the first that can be read, if any) or `NONE`.

    Raises ConfigError for an unknown name, and where the named sensor cannot be read.
    """
    if name not in (AUTO, NONE, *SENSORS):
        names = ", ".join((AUTO, NONE, *SENSORS))
        raise ConfigError(f"--energy-sensor must be one of {names}, got {name!r}")
    sensors: tuple[Sensor, ...] = (Ina3221(root), Pi5Pmic(vcgencmd), Rapl(root))
    for sensor in sensors:
        meter = EnergyMeter(sensor)
        if name in (AUTO, sensor.name) and meter.measure_power_w() is not None:
            return meter
    if name in (AUTO, NONE):
        return EnergyMeter()
    raise ConfigError(
        f"--energy-sensor {name} reads no power here: {SENSORS[name]}, or leave the option out"
    )
