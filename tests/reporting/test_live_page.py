"""The live page in a real browser: it loads, keeps up, comes back, and looks as it should."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.incident import Incident
from collapipe_flwr.core.json_codec import to_json
from collapipe_flwr.reporting.live.feed import Feed
from collapipe_flwr.reporting.live.server import LiveServer
from collapipe_flwr.reporting.progress import PROGRESS, ClusterProgress, RunProgress
from tests.reporting.browser import SIZES, Tab
from tests.reporting.made_up_runs import MadeUpRun
from tests.thorough import few

pytestmark = pytest.mark.long
_BOXES = """(kinds) => {
  const kindOf = (each) => kinds.find((kind) => each.classList.contains(kind));
  return [...document.querySelectorAll("article, div")].filter(kindOf).map((each) => {
    const {left, right, top, bottom} = each.getBoundingClientRect();
    const clipped = each.scrollWidth > each.clientWidth + 1;
    return {kind: kindOf(each), left, right, top, bottom, clipped};
  });
}"""
_KINDS = ["cluster", "stage", "tile"]


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    made = MadeUpRun(tmp_path / "run", rounds_asked=4)
    made.end_round()
    return made


@contextmanager
def _serving(run: Path, port: int = 0) -> Iterator[LiveServer]:
    feed = Feed(lambda: run)
    with ExitStack() as stack:
        server = LiveServer(feed, port=port)
        stack.enter_context(server.serve())
        stack.enter_context(feed.follow())
        yield server


@contextmanager
def _open(browser: Any, server: LiveServer, *look: str) -> Iterator[Tab]:
    """The page of a run; fails by what its console said."""
    tab = Tab(browser, *look)
    try:
        tab.page.goto(server.url)
        yield tab
    finally:
        tab.close()
    assert tab.complaints == []


def _shows(tab: Tab, selector: str, text: str) -> None:
    from playwright.sync_api import expect

    expect(tab.page.locator(selector)).to_have_text(text, timeout=60_000)


def _count(tab: Tab, selector: str) -> int:
    return int(tab.page.locator(selector).count())


def test_it_shows_the_run_and_its_clusters_as_chains(browser: Any, run: MadeUpRun) -> None:
    with _serving(run.path) as server, _open(browser, server) as tab:
        _shows(tab, "#status", "running")
        _shows(tab, "#name", "run")
        _shows(tab, "#drawn", "as of round 1")
        assert _count(tab, ".cluster.open") == 2
        assert _count(tab, "[data-cluster=cluster-0] .stage") == 5  # control unit, 3 devices, edge
        assert _count(tab, "[data-cluster=cluster-0] .hop") == 4
        text = tab.page.inner_text("[data-cluster=cluster-0]")
        assert "micro-batches/s" in text
        assert "Mbit/s" in text
        assert "blocks 0\N{EN DASH}1" in text


def test_it_keeps_up_with_rounds_and_draws_their_charts(browser: Any, run: MadeUpRun) -> None:
    with _serving(run.path) as server, _open(browser, server) as tab:
        _shows(tab, "#drawn", "as of round 1")
        before = tab.page.inner_text("[data-cluster=cluster-1] .rate")
        replayed = Incident(
            kind="recovered", text="device 2-raspberry-pi-4 was replayed", cluster="cluster-1"
        )
        run.end_round(incidents=(replayed,))
        _shows(tab, "#drawn", "as of round 2")
        assert tab.page.inner_text("[data-cluster=cluster-1] .rate") != before
        assert "was replayed" in tab.page.inner_text("#happened")
        tab.page.locator("#learning [data-chart=loss]").scroll_into_view_if_needed()
        tab.page.wait_for_selector("[data-chart=loss].js-plotly-plot .trace")
        run.end_round()
        points = tab.page.locator("[data-chart=loss] .trace >> nth=0 >> .point")
        points.nth(2).wait_for(state="attached")


def test_an_ended_run_says_so(browser: Any, run: MadeUpRun) -> None:
    with _serving(run.path) as server, _open(browser, server) as tab:
        _shows(tab, "#status", "running")
        assert tab.page.locator("#notice").is_hidden()
        run.save("failed", "cluster-0 ran out of memory")
        _shows(tab, "#status", "failed")
        _shows(tab, "#notice", "cluster-0 ran out of memory")
        run.save("completed")
        _shows(tab, "#status", "completed")
        assert tab.page.locator("#notice").is_hidden()
        assert not tab.page.evaluate("document.body.classList.contains('running')")


def test_a_long_round_shows_how_far_it_is(browser: Any, run: MadeUpRun) -> None:
    def write(trained: int, at_s: float) -> None:
        clusters = {"cluster-0": ClusterProgress(trained=trained, of=8)}
        now = RunProgress(
            phase="training", since_s=0.0, at_s=at_s, round_index=2, clusters=clusters
        )
        write_text(run.path / PROGRESS, to_json(now))

    with _serving(run.path) as server, _open(browser, server) as tab:
        write(2, 10.0)
        _shows(tab, "#phase", "Round 2: training, 2 of 8 micro-batches")
        write(6, 12.0)
        _shows(tab, "[data-cluster=cluster-0] .rate", "6 of 8 micro-batches, 2/s")
        (run.path / PROGRESS).unlink()
        run.end_round()
        _shows(tab, "#drawn", "as of round 2")
        assert tab.page.locator("#phase").is_hidden()
        assert "micro-batches/s" in tab.page.inner_text("[data-cluster=cluster-0] .rate")


def test_before_the_first_round_it_shows_what_is_known(browser: Any, tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", rounds_asked=4)
    with _serving(run.path) as server, _open(browser, server) as tab:
        _shows(tab, "#status", "running")
        tiles = tab.page.inner_text("#tiles")
        assert "0 of 4" in tiles and "clusters, 8 members in all" in tiles
        known = tab.page.inner_text("#known")
        assert "cluster-1: " in known and "3-phone" in known and "waiting for" in known
        run.end_round()
        _shows(tab, "#drawn", "as of round 1")
        assert tab.page.locator("#known").is_hidden()


def test_it_waits_for_a_run_that_is_not_there(browser: Any, tmp_path: Path) -> None:
    with _serving(tmp_path / "run") as server, _open(browser, server) as tab:
        _shows(tab, "#status", "waiting")
        run = MadeUpRun(tmp_path / "run")
        run.end_round()
        _shows(tab, "#status", "running")
        _shows(tab, "#drawn", "as of round 1")


def test_rounds_that_a_resumed_run_dropped_are_gone(browser: Any, run: MadeUpRun) -> None:
    first = run.events[0]
    run.end_round(incidents=(Incident(kind="remark", text="cluster-0: was slow"),))
    with _serving(run.path) as server, _open(browser, server) as tab:
        _shows(tab, "#drawn", "as of round 2")
        assert tab.page.locator("#latest").is_visible()
        run.directory.rewrite_events([first.as_json()])
        _shows(tab, "#drawn", "as of round 1")
        assert tab.page.locator("#latest").is_hidden()


def test_it_comes_back_when_the_server_does(browser: Any, run: MadeUpRun) -> None:
    tab = Tab(browser)
    with _serving(run.path) as server:
        port = server.server_port
        tab.page.goto(server.url)
        _shows(tab, "#drawn", "as of round 1")
        tab.page.evaluate("window.sameDocument = true")
    _shows(tab, "#link", "no connection to collapipe watch; trying again")
    run.end_round()
    with _serving(run.path, port):
        _shows(tab, "#drawn", "as of round 2")
        assert tab.page.evaluate("window.sameDocument")
        tab.close()


def test_names_from_elsewhere_are_text(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    run = MadeUpRun(tmp_path / "run")
    event = run.event(1).as_json()
    text = run.directory.path / "events.jsonl"
    told = Incident(kind="remark", text=f"{evil}: {evil}")
    line = json.dumps({**event, "incidents": [asdict(told)]})
    text.write_text(line.replace("cluster-0", evil).replace("phone", "<b>phone") + "\n")
    with _serving(run.path) as server, _open(browser, server) as tab:
        _shows(tab, "#drawn", "as of round 1")
        assert evil in tab.page.inner_text("#clusters")
        assert evil in tab.page.inner_text("#happened")
        tab.page.wait_for_selector("#incidents table", state="attached")
        assert _count(tab, "img") == 0


@pytest.mark.parametrize("size", few(SIZES, 0))
def test_it_fits_every_screen_in_light_and_dark(browser: Any, run: MadeUpRun, size: str) -> None:
    with _serving(run.path) as server:
        light, dark = (_look(browser, server, size, scheme) for scheme in ("light", "dark"))
    assert light["boxes"] == dark["boxes"]
    assert light["brightness"] > 128 > dark["brightness"]
    assert light["width"] <= SIZES[size][0]
    boxes = light["boxes"]
    assert all(0 <= box["left"] < box["right"] <= SIZES[size][0] for box in boxes)
    assert not [box for box in boxes if box["clipped"]]
    for kind in _KINDS:
        alike = [box for box in boxes if box["kind"] == kind]
        assert alike
        assert not _overlapping(alike)


def _look(browser: Any, server: LiveServer, size: str, scheme: str) -> dict[str, Any]:
    with _open(browser, server, size, scheme) as tab:
        _shows(tab, "#drawn", "as of round 1")
        tab.page.wait_for_selector("#learning")
        colour = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        parts = colour.removeprefix("rgb(").removesuffix(")").split(",")
        return {
            "boxes": tab.page.evaluate(_BOXES, _KINDS),
            "width": tab.page.evaluate("document.documentElement.scrollWidth"),
            "brightness": sum(map(int, parts)) / 3,
        }


def _overlapping(boxes: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        (a, b)
        for index, a in enumerate(boxes)
        for b in boxes[index + 1 :]
        if a["left"] < b["right"] - 0.5
        and b["left"] < a["right"] - 0.5
        and a["top"] < b["bottom"] - 0.5
        and b["top"] < a["bottom"] - 0.5
    ]


def test_many_clusters_are_found_ordered_and_opened(browser: Any, tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", clusters=12, devices=4)
    run.end_round(lost=("cluster-7",))
    with _serving(run.path) as server, _open(browser, server) as tab:
        _shows(tab, "#drawn", "as of round 1")
        assert (_count(tab, ".cluster"), _count(tab, ".cluster.open")) == (12, 0)
        tab.page.select_option("#order", "trouble")
        assert tab.page.locator(".cluster").first.get_attribute("data-cluster") == "cluster-7"
        tab.page.fill("#find", "cluster-11")
        assert _count(tab, ".cluster:visible") == 1
        tab.page.click("[data-cluster=cluster-11] button")
        assert _count(tab, "[data-cluster=cluster-11] .stage") == 6


@pytest.mark.slow
def test_a_hundred_clusters_and_a_thousand_rounds_are_quick(browser: Any, tmp_path: Path) -> None:
    """First paint under 2 s, the median update under 100 ms, unless others have the processors."""
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is busy: {os.getloadavg()[0]:.0f} processes want to run")
    run = MadeUpRun(tmp_path / "run", clusters=100, devices=10, rounds_asked=2000)
    run.begin_long(1000)
    with _serving(run.path) as server, _open(browser, server) as tab:
        tab.page.wait_for_selector(".cluster .strip")
        first, *_ = _painted(tab)
        assert first["startTime"] + first["duration"] < 2000
        event = run.event(1).as_json()
        for index in range(1001, 1011):
            run.directory.append_event({**event, "round_index": index})
            tab.page.wait_for_selector(f"#drawn >> text=as of round {index}")
        took = sorted(each["duration"] for each in _painted(tab)[1:])
        assert len(took) >= 9
        assert took[len(took) // 2] < 100


def _painted(tab: Tab) -> list[dict[str, Any]]:
    """Each time that clusters were drawn: from the message to the frame, in milliseconds."""
    found = tab.page.evaluate(
        "performance.getEntriesByName('collapipe:shown')"
        ".map(({startTime, duration, detail}) => ({startTime, duration, detail}))"
    )
    return [each for each in found if each["detail"] == "clusters"]
