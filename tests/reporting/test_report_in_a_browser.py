"""A report in a real browser: it draws all charts at every size, light and dark, without errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from collapipe_flwr.core.incident import Incident
from collapipe_flwr.reporting.report.page import write_run_report
from tests.reporting.made_up_runs import MadeUpRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.long

SIZES = {"phone": (360, 780), "laptop": (1280, 800), "wide": (1920, 1080)}
# Texts that leave the chart they belong to, or that lie upon their neighbour on an axis.
_CUT = """() => [...document.querySelectorAll("[data-chart]")].flatMap((chart) => {
  const frame = chart.getBoundingClientRect();
  return [...chart.querySelectorAll("svg text")].filter((text) => {
    const box = text.getBoundingClientRect();
    return box.width && (box.left < frame.left - 1 || box.right > frame.right + 1 ||
      box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
  }).map((text) => `${chart.dataset.chart}: ${text.textContent}`);
})"""
_OVERLAPPING = """() => [...document.querySelectorAll("[data-chart]")].flatMap((chart) =>
  ["xtick", "ytick", "legendtext"].flatMap((kind) => {
    const boxes = [...chart.querySelectorAll(`.${kind} text, text.${kind}`)].map((text) =>
      [text.textContent, text.getBoundingClientRect()]);
    return boxes.flatMap(([name, a], place) => boxes.slice(place + 1).filter(([, b]) =>
      a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1
    ).map(([other]) => `${chart.dataset.chart} ${kind}: ${name} / ${other}`));
  }))"""
_DRAWN = """() => Object.fromEntries([...document.querySelectorAll("[data-chart]")].map((chart) =>
  [chart.dataset.chart, chart.querySelectorAll(
    ".scatterlayer .trace, .barlayer .trace, .heatmaplayer .hm"
  ).length]))"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How somebody looks at a report, offline; ``said`` collects what its console shows."""

    size: str
    scheme: str = "light"
    said: list[str] = field(default_factory=list)

    @contextmanager
    def page(self, browser: Browser) -> Iterator[Page]:
        """An empty page in a window of its own."""
        width, height = SIZES[self.size]
        phone = self.size == "phone"
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if self.scheme == "dark" else "light",
            has_touch=phone,
            is_mobile=phone,
            offline=True,
        )
        page = context.new_page()
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        try:
            yield page
        finally:
            context.close()

    def open(self, page: Page, path: Path) -> None:
        """Show a report and wait until its charts are drawn."""
        page.goto(path.as_uri())
        page.wait_for_selector("body.drawn")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with everything that reports show but a timeline."""
    run = MadeUpRun(tmp_path_factory.mktemp("runs") / "run", clusters=3, devices=4)
    for index in range(1, 41):
        told = (
            Incident(
                kind="quarantined", cluster="cluster-0", text="cluster-0/2-jetson-nano: sent NaN"
            ),
            Incident(kind="late", text="cluster cluster-1 joins late by 2 rounds"),
        )
        lost = ("cluster-2",) if index == 9 else ()
        run.end_round(incidents=told if index % 7 == 0 else (), lost=lost)
    run.save("completed")
    return write_run_report(run.path)


# What fits depends on the size alone: one scheme each is part of every check.
@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        ("phone", "light"),
        ("laptop", "dark"),
        ("wide", "light"),
        pytest.param("phone", "dark", marks=pytest.mark.slow),
        pytest.param("laptop", "light", marks=pytest.mark.slow),
        pytest.param("wide", "dark", marks=pytest.mark.slow),
    ],
)
def test_all_charts_are_drawn_whole(browser: Browser, report: Path, size: str, scheme: str) -> None:
    window = Window(size=size, scheme=scheme)
    with window.page(browser) as page:
        window.open(page, report)
        drawn = page.evaluate(_DRAWN)
        assert len(drawn) >= 12
        assert all(drawn.values()), drawn
        assert page.evaluate(_CUT) == []
        assert page.evaluate(_OVERLAPPING) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
        red, *_ = _background(page)
        assert (red < 60) == (scheme == "dark")
    assert window.said == []


def test_another_cluster_can_be_chosen(browser: Browser, report: Path) -> None:
    window = Window(size="laptop")
    with window.page(browser) as page:
        window.open(page, report)
        shown = "document.querySelector('[data-chart=placement]').data[0].text.flat().join()"
        before = page.evaluate(shown)
        page.select_option("select[data-choices=placement]", "cluster-2")
        page.wait_for_function(f"{shown} !== {before!r}")
    assert window.said == []


def test_a_phone_shows_all_numbers_and_that_tables_go_on(browser: Browser, report: Path) -> None:
    window = Window(size="phone")
    with window.page(browser) as page:
        window.open(page, report)
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["phone"][0]
        cue = page.evaluate(
            "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
            ".map((e) => getComputedStyle(e).backgroundImage)"
        )
        assert cue and all("gradient" in image for image in cue)
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        page.wait_for_function(
            "[...document.querySelectorAll('.values')].every((e) => e.querySelector('td'))"
        )
        values = page.evaluate(
            "[...document.querySelectorAll('[data-values=metric-accuracy] tr')]"
            ".map((row) => row.children[1].textContent)"
        )
        drawn = page.evaluate("report.charts['metric-accuracy'].figure.data[0].y.map(String)")
        assert values == ["test, by the server", *drawn]
        cells = page.evaluate("document.querySelectorAll('[data-values=placement] td').length")
        assert cells == 4 * 41  # devices, and rounds behind their names
    assert window.said == []


def test_a_phone_shows_the_blocks_of_a_dozen_rounds(browser: Browser, tmp_path: Path) -> None:
    run = MadeUpRun(tmp_path / "run", devices=3)
    for _ in range(12):
        run.end_round()
    run.save("completed")
    window = Window(size="phone")
    with window.page(browser) as page:
        window.open(page, write_run_report(run.path))
        texts = page.evaluate(
            "[...document.querySelectorAll('[data-chart=placement] .heatmap-label')]"
            ".filter((each) => each.textContent).length"
        )
        assert texts == 3 * 12
    assert window.said == []


def test_charts_follow_a_change_of_theme_and_new_data(browser: Browser, report: Path) -> None:
    window = Window(size="laptop")
    with window.page(browser) as page:
        window.open(page, report)
        colour = "document.querySelector('[data-chart=loss]').layout.font.color"
        before = page.evaluate(colour)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(f"{colour} !== {before!r}")
        page.evaluate(
            "report.show('loss', {figure: {data: [{type: 'bar', x: [1], y: [2]}], layout: {}}})"
        )
        assert page.evaluate("document.querySelector('[data-chart=loss]').data.length") == 1
    assert window.said == []


def test_it_prints(browser: Browser, report: Path) -> None:
    window = Window(size="laptop", scheme="dark")
    with window.page(browser) as page:
        window.open(page, report)
        assert len(page.pdf(format="A4")) > 20_000
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        page.wait_for_function(
            "[...document.querySelectorAll('[data-chart]')].every((e) => e.layout.width === 640)"
        )
        light = "document.querySelector('[data-chart=loss]').layout.font.color"
        assert page.evaluate(light) == "#1b1f24"
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        page.wait_for_function(f"{light} !== '#1b1f24'")
    assert window.said == []


def test_names_are_shown_as_they_are_and_never_run(browser: Browser, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    run = MadeUpRun(tmp_path / "run", name=name)
    run.end_round(
        incidents=(Incident(kind="lost", text=name, cluster=name),),
        metrics={name: 0.5, "accuracy": 0.1},
    )
    run.save("completed")
    window, opened = Window(size="wide"), []
    with window.page(browser) as page:
        page.on("dialog", lambda dialog: (opened.append(dialog.message), dialog.dismiss()))
        window.open(page, write_run_report(run.path, name=name))
        assert page.title() == f"Run {name}"
        assert page.query_selector("img") is None
        assert all(page.evaluate(_DRAWN).values())
        assert "onerror=alert(1)>" in page.evaluate(
            "document.querySelector('[data-chart=energy] .ytick text').textContent"
        )
    assert opened == [] and window.said == []


def _background(page: Page) -> list[int]:
    text = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return [int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(",")]
