"""Turns during which a virtual machine's host took processors away are taken again."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from benchmarks.data_plane import duel
from benchmarks.data_plane.duel import Pace, Stolen, quietest


class Shares:
    """A machine whose turns are stolen from as given."""

    def __init__(self, *shares: float) -> None:
        self._shares = itertools.cycle(shares)

    def share(self) -> float:
        return next(self._shares)


class Side:
    """A runtime that notes when it is asked."""

    def __init__(self, asked: list[str], name: str) -> None:
        self.asked, self.name, self.steps_s = asked, name, [9.0]

    def turn(self, steps: int) -> None:
        self.asked.append(self.name)
        self.steps_s.append(float(steps))


def turns(monkeypatch, shares: Shares, pace: Pace) -> tuple[list[float], list[str]]:
    asked: list[str] = []
    monkeypatch.setattr(duel, "Stolen", lambda: shares)
    sides = [Side(asked, "ours"), Side(asked, "theirs")]
    found = duel._take_turns(sides, pace)
    assert all(side.steps_s == [pace.steps] * len(found) for side in sides)
    return found, asked


def test_on_a_quiet_machine_there_are_as_many_turns_as_asked(monkeypatch):
    found, asked = turns(monkeypatch, Shares(0.0, 0.01), Pace(turns=3))
    assert found == [0.0, 0.01, 0.0]
    assert asked == ["theirs", "ours", "ours", "theirs", "theirs", "ours"]


def test_disturbed_turns_are_taken_again_up_to_a_limit(monkeypatch):
    found, _ = turns(monkeypatch, Shares(0.5, 0.0), Pace(turns=3, most=4))
    assert found == [0.5, 0.0, 0.5, 0.0, 0.5, 0.0]
    assert quietest(found, 3) == [1, 3, 5]
    found, _ = turns(monkeypatch, Shares(0.5, 0.3), Pace(turns=3, most=2))
    assert len(found) == 6
    assert quietest(found, 3) == [1, 3, 5]


def test_the_share_is_what_the_system_counts(monkeypatch, tmp_path):
    counters = tmp_path / "stat"
    monkeypatch.setattr(duel, "_COUNTERS", counters)
    seconds = iter([0.0, 10.0, 20.0])
    two_processors = SimpleNamespace(cpu_count=lambda: 2, sysconf=lambda _: 100)
    monkeypatch.setattr(duel, "os", two_processors)
    monkeypatch.setattr(duel, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    counters.write_text("cpu  1 2 3 4 5 6 7 800 0 0\ncpu0 1 2\n")
    looked = Stolen()
    counters.write_text("cpu  1 2 3 4 5 6 7 1000 0 0\ncpu0 1 2\n")
    assert looked.share() == pytest.approx(2.0 / 20.0)
    counters.unlink()
    assert looked.share() <= 0.0
