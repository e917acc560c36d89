"""The worked example shows what a run prints: its record is the program's own words."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
from typing import Any

import pytest
from rich.console import Console

from benchmarks import worked_example as example
from collapipe_flwr.reporting.console import ProgressPrinter, summary_table
from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.run_directory import read_events
from tests.docs.pages import ROOT

MOST_BYTES = 150_000  # of all pictures


@pytest.fixture
def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((example.RECORD / example.SUMMARY).read_text())
    return found


def lines_of(console: Console) -> list[str]:
    return [line.rstrip() for line in console.export_text().splitlines()]


def recording(width: int) -> Console:
    return Console(record=True, width=width, file=io.StringIO(), highlight=False)


def test_the_page_shows_the_record() -> None:
    text = example.PAGE.read_text(encoding="utf-8")
    assert text == example.rendered(text)
    assert set(re.findall(r"<!-- shown (\S+) -->", text)) == {"start", "rounds", "end", "answers"}


def test_the_command_is_that_of_make_demo() -> None:
    text = example.PAGE.read_text(encoding="utf-8")
    command = shlex.join(["collapipe", *example.COMMAND])
    assert f".venv/bin/{command}\n" in text
    assert f"/{command}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_lines_of_rounds_are_those_of_the_program(summary: dict[str, Any]) -> None:
    console = recording(200)
    printer = ProgressPrinter(summary["rounds_asked"], console)
    for event in read_events(example.RECORD):
        printer.show(RoundEvent.of_json(event))
    printed = lines_of(console)
    heads = [number for number, line in enumerate(printed) if line.startswith("round ")]
    shown = example.shown("rounds")
    assert shown == [*printed[: heads[2]], "...", *printed[heads[-1] :]]


def test_the_closing_table_is_that_of_the_program(summary: dict[str, Any]) -> None:
    console = recording(200)
    console.print(summary_table(summary), width=200)
    assert "\n".join(lines_of(console)) in "\n".join(example.shown("end"))


def test_what_is_said_before_the_first_round_is_in_the_program() -> None:
    sources = " ".join(
        path.read_text(encoding="utf-8")
        for folder in ("collapipe_flwr", "server_app")
        for path in (ROOT / folder).rglob("*.py")
    )
    start = example.shown("start")
    plain = [line for line in start if not re.search(r"\d", line)]
    assert len(plain) > 2 and not [line for line in plain if line not in sources]
    assert start[-1].startswith("untrained: loss ")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_pictures_are_small_and_say_what_the_record_says(summary: dict[str, Any]) -> None:
    found = {path.name: path.read_text(encoding="utf-8") for path in example.RECORD.glob("*.svg")}
    assert {name for name, _ in example.pictures()} == set(found)
    assert sum(map(len, found.values())) < MOST_BYTES
    page = example.PAGE.read_text(encoding="utf-8")
    assert all(f"(worked-example/{name})" in page for name in found)
    clusters = summary["plan"]["clusters"]
    devices = {segment["device_id"] for cluster in clusters for segment in cluster["segments"]}
    assert all(name.rpartition("/")[2] in found["placement.svg"] for name in devices)
    assert not re.search(r'(?:href|src)="(?!#)', "".join(found.values()))  # nothing from elsewhere
