"""Power sensors of boards and PCs. Each sees the whole machine: idle power and other programs too.

Roots are parameters, so that tests can use a sysfs of their own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

SYSFS = Path("/sys")
VCGENCMD = "vcgencmd"
Reading = tuple[float, ...]  # of one sensor, which alone knows what it means
_VCGENCMD_S = 2.0


class Sensor:
    """A sensor to `read` every ``period_s``; readings much further apart than that are useless.

    ``name`` is the value of `--energy-sensor`. Readings are in watts unless `joules` differs.
    """

    name: ClassVar[str]
    period_s: ClassVar[float]

    def read(self) -> Reading:
        """Raises OSError or ValueError where there is nothing to read."""
        raise NotImplementedError

    def joules(self, before: Reading, after: Reading, elapsed_s: float) -> float:
        """Used between two readings: their mean times the seconds."""
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
        """Counter and range of every zone, in uJ."""
        found = [
            float(int((zone / file).read_text()))
            for zone in self._zones()
            for file in ("energy_uj", "max_energy_range_uj")
        ]
        if not found:
            raise OSError("no zone of a processor package")
        return tuple(found)

    def joules(self, before: Reading, after: Reading, elapsed_s: float) -> float:
        del elapsed_s
        if len(before) != len(after):
            raise ValueError("a zone came or went")
        counters = zip(before[::2], after[::2], after[1::2], strict=True)
        return sum((now - then) % (most + 1) for then, now, most in counters) / 1e6

    def _zones(self) -> Iterator[Path]:
        for zone in sorted((self.root / "class/powercap").glob("intel-rapl:*")):
            label = _text(zone / "name")
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
        """Watts of each rail."""
        watts = dict(self._watts())
        total = [watts[label] for label in _TOTALS if label in watts]
        found = total[:1] or [value for label, value in watts.items() if label not in _FED]
        if not found:
            raise OSError("no rail of an INA3221")
        return tuple(found)

    def _watts(self) -> Iterator[tuple[str, float]]:
        for monitor in sorted((self.root / "class/hwmon").glob("hwmon*")):
            if _text(monitor / "name") != "ina3221":
                continue
            for label in sorted(monitor.glob("in[0-9]_label")):
                rail, number = _text(label), label.name[2]
                current = monitor / f"curr{number}_input"
                if rail in _UNUSED or not current.exists():  # unused, or the sum of shunt voltages
                    continue
                millivolt = int((monitor / f"in{number}_input").read_text())
                yield rail, millivolt * int(current.read_text()) / 1e6


_TOTALS = ("VDD_IN", "POM_5V_IN")  # of Orin NX and Nano, Xavier NX; of the first Nano
_FED = ("VDDQ_VDD2_1V8AO",)  # of AGX Orin: fed by VIN_SYS_5V0
_UNUSED = ("", "NC")


@dataclass(frozen=True, slots=True)
class Pi5Pmic(Sensor):
    """The rails behind a Raspberry Pi 5's power chip, without what hangs on its USB ports."""

    name = "pi5-pmic"
    period_s = 1.0
    command: str = VCGENCMD

    def read(self) -> Reading:
        """Watts of each rail."""
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
            raise ValueError(f"{self.command} pmic_read_adc says no currents")
        return tuple(watts)


_RAIL = re.compile(r"^\s*(\w+)_[AV] (?:current|volt)\(\d+\)=([-.\w]+)([AV])\s*$", re.MULTILINE)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
