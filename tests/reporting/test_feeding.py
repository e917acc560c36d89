"""No tool slows or ends a run, and one that comes back misses nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from collapipe_flwr.reporting.sinks import Feeder, Scalar

LIMIT_S = 60.0


class Tool:
    """Fails where it is told to, and may be held."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.kept, self.opened = set(failing), [], []
        self.ends_badly = False
        self.ending: tuple[str, list[Path]] | None = None
        self.free = threading.Event()
        self.free.set()

    def open(self, first: int) -> Tool:
        self.opened.append(first)
        return self

    def write(self, step: int, values: Sequence[Scalar]) -> None:
        assert self.free.wait(LIMIT_S)
        if step in self.failing:
            self.failing.remove(step)
            raise OSError(f"no room for {step}\nand more words")
        self.kept.append((step, [value.value for value in values]))

    def close(self, status: str, artefacts: Iterable[Path]) -> None:
        if self.ends_badly:
            raise OSError("no room for the end")
        self.ending = status, list(artefacts)


def loss(value: float) -> list[Scalar]:
    return [Scalar(name="train/loss", value=value)]


def fed(tool: Tool, *steps: int) -> Feeder:
    feeder = Feeder("tool", tool.open)
    for step in steps:
        feeder.write(step, loss(step))
    feeder.end("completed", [Path("report.html")])
    feeder.wait(LIMIT_S)
    return feeder


def test_rounds_come_in_order_and_the_end_comes_last() -> None:
    tool = Tool()
    assert fed(tool, 3, 4, 5).take_problem() == ""
    assert tool.opened == [3]
    assert tool.kept == [(3, [3]), (4, [4]), (5, [5])]
    assert tool.ending == ("completed", [Path("report.html")])


def test_what_failed_is_written_with_the_next_round_and_said_once() -> None:
    tool = Tool(2, 3)
    feeder = fed(tool, 1, 2, 3, 4)
    assert [step for step, _ in tool.kept] == [1, 2, 3, 4]
    assert tool.opened == [1, 2, 3]  # each time from the round that is missing
    assert feeder.take_problem() == (
        "reporting.sinks: tool misses rounds (OSError: no room for 2); they are tried again"
    )
    assert feeder.take_problem() == ""


def test_what_is_missing_at_the_end_is_said_also_after_an_earlier_failure() -> None:
    tool = Tool(1)
    feeder = Feeder("tool", tool.open)
    tool.ends_badly = True
    feeder.write(1, loss(1))
    feeder.end("completed", [])
    feeder.wait(LIMIT_S)
    assert feeder.take_problem() == (
        "reporting.sinks: tool misses the end of the run (OSError: no room for the end)"
    )
    assert feeder.take_problem() == ""


def test_a_tool_that_hangs_holds_up_nobody() -> None:
    tool = Tool()
    tool.free.clear()
    feeder = Feeder("tool", tool.open)
    for step in range(1, 4):
        feeder.write(step, loss(step))  # returns although nothing is taken
    feeder.end("completed", [])
    feeder.wait(0.0)
    assert feeder.take_problem().startswith("reporting.sinks: tool misses rounds (it took too long")
    tool.free.set()
    feeder.wait(LIMIT_S)
    assert [step for step, _ in tool.kept] == [1, 2, 3]
