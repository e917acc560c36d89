"""`collapipe cluster status`, for eyes and for scripts."""

from __future__ import annotations

import pytest
from rich.console import Console

from collapipe_flwr.cluster.profile import Measured, Measurements
from collapipe_flwr.membership.members import AWAY, EXPECTED, READY, ClusterStatus, MemberStatus
from collapipe_flwr.reporting.output import counted, number, progress
from collapipe_flwr.reporting.tables import (
    follow,
    measurements_table,
    status_lines,
    status_table,
)

MEMBERS = (
    MemberStatus(
        name="pi-1",
        role="device",
        address="[fe80::1]:50071",
        state=READY,
        roster=4,
        speed_flop_per_s=9.5e9,
        memory_bytes=1_500_000_000,
        resident_bytes=62_000_000,
        clock_ahead_s=-0.2,
    ),
    MemberStatus(name="pi-2", role="device", address="h:1", state=AWAY, fault="no answer"),
    MemberStatus(name="edge", role="edge", address="", state=EXPECTED),
)
FOUND = ClusterStatus(cluster_id="shed", version=5, members=MEMBERS)


def shown(console: Console) -> str:
    with console.capture() as capture:
        console.print(status_table(FOUND))
    return capture.get()


def test_lines_say_who_is_there_and_why_not() -> None:
    assert list(status_lines(FOUND)) == [
        "cluster shed, roster 5, 3 members",
        "device pi-1 at [fe80::1]:50071 ready",
        "device pi-2 at h:1 away: no answer",
        "edge edge has not joined",
    ]
    assert not FOUND.complete


def test_the_table_has_what_is_known() -> None:
    (row,) = [line for line in shown(Console(width=120)).splitlines() if "pi-1" in line]
    assert row.split() == [
        *("pi-1", "device", "[fe80::1]:50071", "ready"),
        *("9.5", "1.5", "62", "-0.2", "4"),
    ]


def test_addresses_of_measured_members_are_no_markup() -> None:
    found = Measurements(
        cluster_id="shed", members=(Measured(name="pi-1", address="[fd00::11]:50071"),)
    )
    console = Console(width=160)
    with console.capture() as capture:
        console.print(measurements_table(found))
    assert "[fd00::11]:50071" in capture.get()


def test_it_follows_until_ctrl_c() -> None:
    console = Console(force_terminal=True, width=120)
    later = ClusterStatus(cluster_id="shed", version=6, members=MEMBERS[:1])
    looks = iter([later])

    def look() -> ClusterStatus:
        try:
            return next(looks)
        except StopIteration:
            raise KeyboardInterrupt from None

    with console.capture() as capture:
        assert follow(console, FOUND, look) == later
    assert "roster 6" in capture.get()


def test_a_clock_that_is_ahead_by_almost_nothing_has_no_sign() -> None:
    assert number(-0.01, 1.0, 1) == "0.0"


def test_a_pipe_is_told_what_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(3) as tick:
        tick("dssda")
        tick("dssda")
        begun = capsys.readouterr().err
        tick("uniform")
    assert begun.splitlines() == ["dssda ..."]
    assert "uniform ..." in capsys.readouterr().err


def test_one_is_no_plural() -> None:
    assert (counted(1, "round"), counted(2000, "round")) == ("1 round", "2,000 rounds")
