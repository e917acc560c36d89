"""Sensors of energy on a made-up sysfs and `vcgencmd`: found, added up, never trusted blindly."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.host import energy
from collapipe_flwr.host.energy import (
    AUTO,
    NONE,
    EnergyMeter,
    Ina3221,
    Pi5Pmic,
    Rapl,
    Reading,
    make_energy_meter,
)

NOWHERE = "/nowhere/vcgencmd"


def zone(root: Path, name: str, value: object, *, label: str = "", most: int = 999_999) -> Path:
    folder = root / "class/powercap" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{value}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    if label:
        (folder / "name").write_text(f"{label}\n")
    return folder


def monitor(root: Path, number: int, rails: dict[str, tuple[int, int]]) -> Path:
    """A hwmon folder of an INA3221 with label: (mV, mA)."""
    folder = root / "class/hwmon" / f"hwmon{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text("ina3221\n")
    for channel, (label, (millivolt, milliampere)) in enumerate(rails.items(), start=1):
        (folder / f"in{channel}_label").write_text(f"{label}\n")
        (folder / f"in{channel}_input").write_text(f"{millivolt}\n")
        (folder / f"curr{channel}_input").write_text(f"{milliampere}\n")
    (folder / "in7_label").write_text("sum of shunt voltages\n")
    (folder / "in7_input").write_text("3\n")
    return folder


def pmic(folder: Path, text: str, code: int = 0) -> str:
    """A `vcgencmd` that says this."""
    script = folder / "vcgencmd"
    script.write_text(
        f"#!/bin/sh\n[ \"$*\" = pmic_read_adc ] && cat <<'END'\n{text}\nEND\nexit {code}\n"
    )
    script.chmod(0o755)
    return str(script)


PMIC = """   3V7_WL_SW_A current(0)=0.10000000A
   3V3_SYS_A current(1)=0.20000000A
   VDD_CORE_A current(7)=2.00000000A
   3V7_WL_SW_V volt(8)=3.70000000V
   3V3_SYS_V volt(9)=3.30000000V
   VDD_CORE_V volt(15)=0.75000000V
   EXT5V_V volt(24)=5.13000000V"""


class Played:
    """A sensor and a clock: each look takes the next (seconds, watts); an error is raised."""

    name, period_s = "played", 1000.0  # looks are the test's alone

    def __init__(self, *looks: tuple[float, float | Exception]) -> None:
        self._looks = iter(looks)
        self._watt: float | Exception = 0.0

    def clock(self) -> float:
        now, self._watt = next(self._looks)
        return now

    def read(self) -> Reading:
        if isinstance(self._watt, Exception):
            raise self._watt
        return (self._watt,)

    def measure_joules(self, before: Reading, after: Reading, elapsed_s: float) -> float:
        return (before[0] + after[0]) / 2 * elapsed_s

    def meter(self) -> EnergyMeter:
        return EnergyMeter(self, self.clock)


def metered(*looks: tuple[float, float | Exception]) -> float | None:
    """Joules of an interval; its first and last looks are these, the others of intervals within."""
    meter = Played(*looks).meter()
    with meter.meter_interval() as outer:
        for _ in range((len(looks) - 2) // 2):
            with meter.meter_interval():
                pass
    return outer.joules


def counted(rapl: Rapl, before: Reading) -> float:
    return rapl.measure_joules(before, rapl.read(), 1.0)


def test_packages_and_their_memory_are_added_up_and_nothing_twice(tmp_path: Path) -> None:
    zones = {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:2": "psys"}
    zones |= {"intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl-mmio:0": "package-0"}
    for name, label in zones.items():
        zone(tmp_path, name, 100, label=label)
    rapl = Rapl(tmp_path)
    before = rapl.read()
    for name, value in zip(zones, (400, 150, 9000, 9000, 130, 9000), strict=True):
        zone(tmp_path, name, value)
    assert counted(rapl, before) == pytest.approx((300 + 50 + 30) / 1e6)


def test_a_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 999_990)
    rapl = Rapl(tmp_path)
    before = rapl.read()
    zone(tmp_path, "intel-rapl:0", 10)
    assert counted(rapl, before) == pytest.approx(20e-6)


def test_a_jetson_counts_the_rail_that_feeds_its_module_once(tmp_path: Path) -> None:
    rails = {"VDD_IN": (5000, 1200), "VDD_CPU_GPU_CV": (5000, 600), "VDD_SOC": (5000, 300)}
    monitor(tmp_path, 3, rails)
    assert Ina3221(tmp_path).read() == (pytest.approx(6.0),)


def test_a_jetson_without_such_a_rail_adds_up_those_that_none_other_feeds(tmp_path: Path) -> None:
    rails = {"VDD_GPU_SOC": (19000, 100), "VDD_CPU_CV": (19000, 50), "VIN_SYS_5V0": (5000, 400)}
    monitor(tmp_path, 1, rails)
    monitor(tmp_path, 2, {"NC": (5000, 100), "VDDQ_VDD2_1V8AO": (5000, 100)})
    other = monitor(tmp_path, 4, {"VDD_IN": (5000, 5000)})
    (other / "name").write_text("ina219\n")
    assert sum(Ina3221(tmp_path).read()) == pytest.approx(1.9 + 0.95 + 2.0)


def test_a_pi_5_multiplies_each_rails_current_and_voltage(tmp_path: Path) -> None:
    sensor = Pi5Pmic(pmic(tmp_path, PMIC))
    assert sum(sensor.read()) == pytest.approx(0.37 + 0.66 + 1.5)


@pytest.mark.parametrize(
    ("text", "code"),
    [('error=1 error_msg="Command not registered"', 0), ("", 255), ("VDD_A current(1)=..A", 0)],
)
def test_a_board_without_that_chip_is_modelled(text: str, code: int, tmp_path: Path) -> None:
    assert not make_energy_meter(AUTO, root=tmp_path, vcgencmd=pmic(tmp_path, text, code)).name


def test_the_sensor_is_found_and_tells_its_power(tmp_path: Path) -> None:
    found = make_energy_meter(AUTO, root=tmp_path, vcgencmd=pmic(tmp_path, PMIC))
    assert (found.name, found.measure_power_w()) == ("pi5-pmic", pytest.approx(2.53))
    monitor(tmp_path, 0, {"VDD_IN": (5000, 1000)})
    found = make_energy_meter(AUTO, root=tmp_path, vcgencmd=pmic(tmp_path, PMIC))
    assert (found.name, found.measure_power_w()) == ("ina3221", pytest.approx(5.0))
    assert (
        make_energy_meter("pi5-pmic", root=tmp_path, vcgencmd=pmic(tmp_path, PMIC)).name
        == "pi5-pmic"
    )


def test_a_machine_without_a_sensor_is_modelled_and_a_named_one_must_be_there(
    tmp_path: Path,
) -> None:
    for name in (AUTO, NONE):
        meter = make_energy_meter(name, root=tmp_path, vcgencmd=NOWHERE)
        with meter.meter_interval() as used:
            pass
        assert (meter.name, meter.measure_power_w(), used.joules) == ("", None, None)
    with pytest.raises(ConfigError, match=r"--energy-sensor rapl reads no power here: let this"):
        make_energy_meter("rapl", root=tmp_path, vcgencmd=NOWHERE)
    with pytest.raises(ConfigError, match="one of auto, none, ina3221, pi5-pmic, rapl, got 'ina'"):
        make_energy_meter("ina", root=tmp_path)


def test_a_counter_that_stands_still_is_no_sensor(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 0)  # as virtual machines have it
    assert not make_energy_meter(AUTO, root=tmp_path, vcgencmd=NOWHERE).name


def test_power_is_integrated_between_looks() -> None:
    assert metered((0, 4.0), (10, 6.0)) == pytest.approx(50.0)
    assert metered((0, 4.0), (10, 6.0), (11, 6.0), (20, 8.0)) == pytest.approx(50 + 6 / 2 + 63)


@pytest.mark.parametrize("wrong", [float("nan"), -50.0, 1e9, float("inf"), OSError("gone")])
def test_one_wrong_look_is_passed_over(wrong: float | Exception) -> None:
    assert metered((0, 5.0), (10, 5.0), (20, wrong), (30, 5.0)) == pytest.approx(150.0)


@pytest.mark.parametrize("wrong", [float("nan"), -50.0, 1e9, float("inf"), OSError("gone")])
def test_an_interval_that_ends_or_begins_with_a_wrong_look_is_modelled(
    wrong: float | Exception,
) -> None:
    assert metered((0, 5.0), (10, wrong)) is None
    assert metered((0, wrong), (10, 5.0)) is None


def test_an_interval_is_modelled_where_its_sensor_was_away_for_long() -> None:
    assert metered((0, 5.0), (7 * Played.period_s, 5.0)) is None


def test_what_stands_still_is_not_metered() -> None:
    assert metered((0, 0.0), (10, 0.0)) is None


def test_intervals_at_the_same_time_share_and_the_next_one_begins_anew() -> None:
    looks = ((0, 5.0), (10, 5.0), (30, 5.0), (40, 5.0), (100, 7.0), (101, 7.0))
    meter = Played(*looks).meter()
    with meter.meter_interval() as outer, meter.meter_interval() as inner:
        pass
    assert (outer.joules, inner.joules) == (pytest.approx(50 + 50 + 50), pytest.approx(50))
    with meter.meter_interval() as later:
        pass
    assert later.joules == pytest.approx(7.0)


def test_of_two_intervals_that_began_together_one_goes_on_when_the_other_ends() -> None:
    meter = Played((0, 5.0), (0, 5.0), (10, 5.0), (20, 5.0)).meter()
    with meter.meter_interval() as outer, meter.meter_interval() as inner:
        pass
    assert (outer.joules, inner.joules) == (pytest.approx(75.0), pytest.approx(25.0))


class Counter:
    """A counter of 6 bits that each look advances by 20 J, so that it soon starts again."""

    name, period_s, looks = "counter", 0.001, 0

    def __init__(self) -> None:
        self.seen = threading.Event()

    def read(self) -> Reading:
        self.looks += 1
        if self.looks == 20:
            self.seen.set()
        return (20.0 * self.looks % 64,)

    def measure_joules(self, before: Reading, after: Reading, elapsed_s: float) -> float:
        del elapsed_s
        return (after[0] - before[0]) % 64


def test_a_sensor_is_looked_at_while_an_interval_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    sensor = Counter()
    meter = EnergyMeter(sensor, clock=itertools.count().__next__)  # a second from look to look
    monkeypatch.setattr(energy, "_MOST_PERIODS", 10_000)
    with meter.meter_interval() as used:
        assert sensor.seen.wait(60.0)
    assert used.joules == 20.0 * (sensor.looks - 1)
