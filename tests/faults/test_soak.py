"""A soak finds what grows, strikes everything in turn, and a short one passes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.faults import soak
from tests.faults.growth import HOUR_S, growth
from tests.faults.soak_schedule import COMBINATIONS, KILL, schedule
from tests.faults.usage import disk_bytes, usages
from tests.testbed.namespaces import namespaces_allowed

MEMBERS = list(soak.CLUSTERS.values())


def test_what_grows_in_the_last_half_is_found_and_a_warm_up_is_not() -> None:
    times = range(0, 3600, 5)
    warm = [(float(t), float(min(t, 1800))) for t in times]
    leaking = [(float(t), float(t % 60 + t)) for t in times]
    assert growth("a", "memory_bytes", warm, 1800.0, 1.0).is_bounded
    found = growth("a", "memory_bytes", leaking, 1800.0, 0.9 * HOUR_S)
    assert not found.is_bounded
    assert found.per_hour == pytest.approx(HOUR_S, rel=0.02)


def test_all_combinations_strike_before_one_strikes_again() -> None:
    faults = schedule(1700, 3600.0, MEMBERS)
    assert faults == schedule(1700, 3600.0, MEMBERS) != schedule(1701, 3600.0, MEMBERS)
    assert [fault.at_s for fault in faults] == [60.0 * n for n in range(1, 60)]
    assert {(f.role, f.kind) for f in faults[: len(COMBINATIONS)]} == set(COMBINATIONS)


def test_only_the_first_cluster_is_killed_and_in_the_last_half_nothing_else() -> None:
    first = {*MEMBERS[0], "cu-a"}
    for fault in itertools.chain(*(schedule(seed, 3600.0, MEMBERS) for seed in range(20))):
        if fault.kind == KILL:
            assert fault.host in first | {"edge", "server"}
            assert fault.host in first or fault.at_s <= 1800.0


def test_a_process_and_a_folder_are_measured(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(100_000))
        file.flush()
        os.fsync(file.fileno())
    assert 100_000 <= disk_bytes(tmp_path) < 200_000
    assert not usages({os.getpid(): "here"}, 0.0)  # it is no program of a deployment


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_short_soak_passes_but_for_growth(tmp_path: Path) -> None:
    """Growth per hour is not known after two minutes, in which processes still warm up."""
    if not namespaces_allowed():
        pytest.skip("network namespaces need root, ip and tc")
    told = soak.run(2.0, 1, tmp_path / "soak")
    judged = {key: holds for key, holds in told["judged"].items() if "grew" not in key}
    assert all(judged.values()), told
    assert told["growths"] and told["rounds"] > 1
