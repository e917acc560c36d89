"""Counters of a machine's energy, on a made-up sysfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.host.energy import Rapl, energy_sensor


def zone(root: Path, name: str, value: int, most: int = 999_999) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{value}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_packages_are_added_up_and_their_parts_are_not(tmp_path: Path) -> None:
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0", "other"):
        zone(tmp_path, name, 100)
    read = Rapl(tmp_path)
    before = read()
    for name, value in (("intel-rapl:0", 400), ("intel-rapl:1", 150), ("intel-rapl:0:0", 9000)):
        zone(tmp_path, name, value)
    assert read() - before == pytest.approx(350e-6)


def test_a_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 999_990)
    read = Rapl(tmp_path)
    before = read()
    zone(tmp_path, "intel-rapl:0", 10)
    assert read() - before == pytest.approx(20e-6)


def test_a_counter_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    folder = zone(tmp_path, "intel-rapl:0", 5)
    read = Rapl(tmp_path)
    (folder / "energy_uj").write_text("broken")
    assert read() is None
    with pytest.raises(ConfigError, match="--energy-sensor rapl"):
        Rapl(tmp_path / "none")


def test_sensors_are_asked_for_by_name() -> None:
    assert energy_sensor("") is None
    with pytest.raises(ConfigError, match="one of rapl"):
        energy_sensor("ina3221")
