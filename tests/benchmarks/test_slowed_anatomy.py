"""`collapipe bench round-anatomy --slowed`: every second of a round belongs to one part."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from math import fsum, isclose
from pathlib import Path
from statistics import median

import pytest

from benchmarks import ROOT, child_environment
from benchmarks.rounds.anatomy import AROUND, KERNELS, PRODUCTS
from benchmarks.rounds.bubbles import FILLING, FRAMES, PASSES
from benchmarks.rounds.slowed import (
    AFTER,
    BEFORE,
    COLLECTION,
    HAND_OUT,
    HELD_UP,
    MOST_OFF,
    OPENING,
    OTHERS,
    ROWS,
    SERVER,
    UNIT,
    cut_round,
    markdown,
    split_passes,
)
from collapipe_flwr.scheduler.estimates import USUAL_STARTS


def call(what: str, begin_s: float, end_s: float) -> dict[str, object]:
    return {"what": what, "begin_s": begin_s, "end_s": end_s}


CALLS = [
    call("OpenSession", 13.0, 13.5),
    call("Missing", 14.0, 14.25),
    call("PushWeights", 14.5, 16.0),
    call("Report", 31.0, 31.5),
    call("FetchWeights", 33.0, 35.0),
    call("CloseSession", 36.0, 36.25),
]


def test_a_round_is_cut_where_its_calls_begin_and_end() -> None:
    """The order comes at 12, the pipeline runs from 20 to 30, the last reply is there at 42."""
    pipeline = {PASSES: 6.0, FRAMES: 1.0, FILLING: 3.0}
    parts = cut_round((10.0, 45.0), (12.0, 38.0), (39.0, 42.0), CALLS, (20.0, 30.0), pipeline)
    assert parts == {
        SERVER: 2.0 + 1.0 + 3.0,
        OTHERS: 3.0,
        UNIT: 1.0 + 1.75,
        OPENING: 0.5,
        HAND_OUT: 2.5,
        BEFORE: 4.0,
        **pipeline,
        COLLECTION: 2.75,
        AFTER: 3.5,
    }
    assert fsum(parts.values()) == 45.0 - 10.0


def test_what_plans_take_for_usual_overheads_of_rounds_is_what_was_recorded() -> None:
    recorded = json.loads((ROOT / "docs/results/anatomy/slowed.json").read_text(encoding="utf-8"))
    clusters = recorded["settings"]["clusters"]
    start_s = {b["name"]: b["overhead_s"] for c in clusters for b in c["boards"]}
    units = {b["name"]: f"{c['name']}-cu" for c in clusters for b in c["boards"]}
    devices = [each for done in recorded["rounds"] for each in done["devices"]]
    sessions_s = [fsum(d["parts_s"][p] for p in (OPENING, HAND_OUT, COLLECTION)) for d in devices]
    of_devices = median(s / start_s[d["device"]] for s, d in zip(sessions_s, devices, strict=True))
    of_units = median(d["parts_s"][UNIT] / start_s[units[d["device"]]] for d in devices)
    assert (of_devices, of_units) == pytest.approx((USUAL_STARTS, USUAL_STARTS), rel=0.1)


def test_passes_are_split_by_cpu_seconds_at_the_share_of_the_board() -> None:
    parts = split_passes({PASSES: 8.0, FRAMES: 1.0}, 0.25, 1.5, 1.0, 0.25)
    assert parts == {PRODUCTS: 4.0, KERNELS: 1.0, AROUND: 1.0, HELD_UP: 2.0, FRAMES: 1.0}


def test_the_table_has_the_means_of_each_device_over_the_rounds_that_it_was_in() -> None:
    def device(name: str, seconds: float) -> dict[str, object]:
        parts = dict.fromkeys(ROWS, 0.0) | {PRODUCTS: seconds}
        return {"device": name, "parts_s": parts, "closes": 1.0}

    rounds = [{"devices": [device("a", 1.0), device("b", 4.0)]}, {"devices": [device("a", 2.0)]}]
    lines = markdown({"rounds": rounds}).splitlines()
    assert lines[0] == "| part | a | b |"
    assert f"| {PRODUCTS} | 1.50 | 4.00 |" in lines
    assert lines[-2] == "| all | 1.50 | 4.00 |"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_round_on_slow_boards_closes(tmp_path: Path) -> None:
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter"))):
        pytest.skip("iproute2 or util-linux is missing")
    path = tmp_path / "slowed.json"
    options = ["--slowed", "--devices", "raspberry-pi-5,jetson-nano", "--rounds", "1"]
    options += ["--examples", "64", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "round-anatomy", *options],
        capture_output=True,
        text=True,
        env=child_environment(),
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert markdown(found) in done.stdout
    (only,) = found["rounds"]
    assert sum(device["blocks"] for device in only["devices"]) == found["settings"]["blocks"]
    for device in only["devices"]:
        assert isclose(fsum(device["parts_s"].values()), device["closes"] * only["round_s"])
        assert abs(device["closes"] - 1) <= MOST_OFF
        assert {PRODUCTS, OPENING, HAND_OUT, COLLECTION, SERVER} <= {
            part for part, seconds in device["parts_s"].items() if seconds > 0
        }
