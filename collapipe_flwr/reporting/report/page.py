"""Reports as files: one page that holds all it needs, plotly.js included.

It is of one run, or of several side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapipe_flwr.core.durable import write_text
from collapipe_flwr.core.errors import (
    CollaPipeError,
    ConfigError,
    RunError,
    name_extra,
    require,
    wrap_unexpected,
)
from collapipe_flwr.reporting import run_directory
from collapipe_flwr.reporting.output import format_count
from collapipe_flwr.reporting.report.charts import Section
from collapipe_flwr.reporting.report.energy import compare_energy, energy
from collapipe_flwr.reporting.report.learning import compare_learning, learning
from collapipe_flwr.reporting.report.links import compare_links, links
from collapipe_flwr.reporting.report.memory import memory
from collapipe_flwr.reporting.report.overview import (
    Tile,
    compare_overview,
    compare_settings,
    incidents,
    settings,
    tiles,
)
from collapipe_flwr.reporting.report.placement import placement
from collapipe_flwr.reporting.report.steps import steps
from collapipe_flwr.reporting.report.template import CSS, PAGE, SCRIPT, SECTION
from collapipe_flwr.reporting.report.times import compare_times, times
from collapipe_flwr.reporting.run_data import RunData, read_run

if TYPE_CHECKING:  # jinja2 is an optional extra
    from jinja2 import Environment

REPORT = "report.html"
_MOST_COLUMNS = 7  # of tiles
_SECTIONS = (learning, placement, times, energy, links, memory, incidents)
_COMPARED = (
    compare_overview,
    compare_learning,
    compare_times,
    compare_energy,
    compare_links,
    compare_settings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What a page shows."""

    title: str
    made: str
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()
    notes: Sequence[str] = ()
    reason: str = ""

    @property
    def charts(self) -> dict[str, Any]:
        """Figures by key, as the page's script reads them."""
        return {key: chart for section in self.sections for key, chart in section.figures.items()}

    def html(self) -> str:
        """Render the whole page; raises ConfigError where the extra is not installed."""
        template, columns = _templates().get_template("page"), balance_columns(len(self.tiles))
        return template.render(
            page=self, columns=columns, css=CSS, script=SCRIPT, plotly=plotly_js()
        )


def balance_columns(tiles: int) -> int:
    """Return the columns in which so many tiles make rows of about one length."""
    rows = max(1, -(-tiles // _MOST_COLUMNS))
    return -(-tiles // rows)


def plotly_js() -> str:
    """Return the library that draws; raises ConfigError where the extra is not installed."""
    with name_extra("report"):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())


def section_html(section: Section) -> str:
    """Render one section of the page; raises ConfigError like :func:`plotly_js`."""
    return _templates().get_template("section").render(section=section)


@cache
def _templates() -> Environment:
    with name_extra("report"):
        from jinja2 import DictLoader, Environment, StrictUndefined
    found = Environment(
        loader=DictLoader({"page": PAGE, "section": SECTION}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return found


def run_sections(run: RunData, run_dir: Path | None = None) -> list[Section]:
    """Make all sections of one run; ``run_dir`` is where its timelines are."""
    return [*(section(run) for section in _SECTIONS), steps(run_dir), settings(run)]


def run_page(run: RunData, run_dir: Path | None = None) -> Page:
    """Make the page of one run."""
    status, reason = run.summary.get("status"), run.summary.get("reason")
    versions = run.summary.get("versions") or {}
    ours = [f"{name} {versions[name]}" for name in ("collapipe-flwr", "flwr") if name in versions]
    return Page(
        title=f"Run {run.name}",
        made=", ".join((f"{format_count(len(run.rounds), 'round')} in events.jsonl", *ours)),
        sections=run_sections(run, run_dir),
        tiles=tiles(run),
        notes=[str(note) for note in run.summary.get("notes", ())],
        reason=f"{status}: {reason}" if reason else "",
    )


def compare_page(runs: Sequence[RunData]) -> Page:
    """Make the page of several runs; raises ConfigError where two have one name."""
    names = [run.name for run in runs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two runs are called {twice!r}: name them apart, as in `collapipe report first=RUN "
            "second=RUN`"
        )
    return Page(
        title=f"{format_count(len(runs), 'run')} side by side",
        made=", ".join(names),
        sections=[section(runs) for section in _COMPARED],
    )


def require_report() -> None:
    """Raise ConfigError, with the install line, where a page cannot be made."""
    for module in ("jinja2", "plotly"):
        require(module, "report")


def write_reports(sources: Sequence[str], output: Path | None) -> Path:
    """Write the page of one run, or of several compared; returns its path.

    Raises ConfigError for a folder of no run or a missing extra.
    """
    require_report()
    runs = [run_directory.find_run(source) for source in sources]
    if len(runs) == 1:
        ((name, folder),) = runs
        return write_run_report(folder, output, name)
    page = compare_page([read_run(folder, name) for name, folder in runs])
    return write_page(page, output or Path(REPORT))


def write_run_report(run_dir: Path, path: Path | None = None, name: str = "") -> Path:
    """Write the report of a run; raises ConfigError, RunError."""
    require_report()
    return write_page(run_page(read_run(run_dir, name), run_dir), path or run_dir / REPORT)


def write_page(page: Page, path: Path) -> Path:
    """Replace ``path``; raises RunError when it cannot be written."""
    try:
        write_text(path, page.html())
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error}); make room, or name another") from error
    return path


def write_closing_report(run_dir: Path, name: str = "", *, hasty: bool = False) -> str:
    """Make the report of a run that has ended, unless it is there; returns a sentence.

    An error does not fail the run, it becomes the sentence. ``name`` is the run directory in it. A
    ``hasty`` end makes no report of many events.
    """
    name = name or str(run_dir)
    if hasty and run_directory.events_bytes(run_dir) > run_directory.MANY_BYTES:
        return f"no report yet: `collapipe report {name}` makes it"
    if not has_report(run_dir):
        try:
            with wrap_unexpected():
                write_run_report(run_dir)
        except CollaPipeError as error:
            return f"no report: {error}; afterwards, `collapipe report {name}` makes it"
    return f"report: {name}/{REPORT}"


def has_report(run_dir: Path) -> bool:
    """Return whether there is a report that is newer than the summary."""
    path, stamp = run_dir / REPORT, run_directory.summary_stamp(run_dir)
    return stamp is not None and path.exists() and path.stat().st_mtime_ns >= stamp[1]
