"""Charts, tables and sections as plain data, and the traces that charts consist of.

A figure is what plotly.js draws: ``{"data": [...], "layout": {...}}``. Colours are words that begin
with ``@``; the page replaces them by those of its light or dark theme (`template.SCRIPT`).
plotly.js interprets tags in text, so names from outside pass :func:`escape_name` on their way in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from math import isfinite
from typing import Any, Protocol

from collapipe_flwr.reporting.output import format_count
from collapipe_flwr.reporting.run_data import Series, stride_of, thin

Json = dict[str, Any]
COLOURS = tuple(f"@c{number}" for number in range(10))
FIRST, SECOND, THIRD, FOURTH, FIFTH, SIXTH, *_ = COLOURS
NOT_MEASURED = "not measured"
MUTED, WARNING = "@muted", "@warning"
MOST_BARS = 24  # of a chart
_MOST_ROWS, _FOLDED_ROWS = 200, 12  # of a table: shown in all, and without a click
_NAME = 30  # letters of a label
_BAR_PIXELS, _FRAME_PIXELS, _LEAST_PIXELS = 24, 96, 150


class Named(Protocol):
    """A run."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure under its title, or one of several ``choices`` (by cluster)."""

    key: str
    title: str
    note: str = ""
    figure: Json | None = None
    choices: Mapping[str, Json] = field(default_factory=dict)

    @property
    def shown(self) -> Json:
        """As the page's script reads it."""
        return {"choices": dict(self.choices)} if self.choices else {"figure": self.figure}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text; the first column names them."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the page; ``empty`` is its text where the run has no such data."""

    key: str
    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    empty: str = "This run recorded nothing of this kind."

    @property
    def figures(self) -> Json:
        """Its charts by key, as the page's script reads them."""
        return {chart.key: chart.shown for chart in self.charts}


def drop_missing(*charts: Chart | None) -> list[Chart]:
    """Drop charts that could not be drawn."""
    return [chart for chart in charts if chart is not None]


def long_table(
    title: str, head: Sequence[str], rows: Sequence[Sequence[str]], noun: str, rest: str
) -> Table:
    """Make a table of limited length; a note counts the ``noun`` left out and says ``rest``."""
    shown = rows[:_MOST_ROWS]
    note = note_left_out(rows, shown, noun, rest)
    return Table(title=title, head=head, rows=shown, note=note, folded=is_long(rows))


def note_left_out(all_of: Sequence[Any], shown: Sequence[Any], noun: str, rest: str) -> str:
    """Say ``3 devices more in the table.``, or nothing where all of them are shown."""
    left = len(all_of) - len(shown)
    return f"{format_count(left, noun)} {rest}." if left else ""


def is_long(rows: Sequence[Sequence[str]]) -> bool:
    """Return whether a table is so long that it is shown folded."""
    return len(rows) > _FOLDED_ROWS


def escape_name(name: str) -> str:
    """Escape text from outside, as plotly.js interprets tags."""
    return escape(name, quote=False)


def label(name: str) -> str:
    """Shorten a name for an axis, see `shorten`."""
    return escape_name(shorten(name))


def shorten(name: str) -> str:
    """Shorten a name for a legend; its end is kept, which says most."""
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"


def line(
    name: str,
    x: Sequence[float],
    y: Sequence[float | None],
    colour: str,
    *,
    dash: str = "solid",
    width: float = 2.0,
) -> Json:
    """Draw a curve; single points are marked where there are few."""
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= 30 else "lines",
        "name": escape_name(name),
        "x": list(x),
        "y": [round_digits(value) for value in y],
        "line": {"color": colour, "dash": dash, "width": width},
        "marker": {"color": colour, "size": 5},
        "hovertemplate": "%{y:.4~g}",
        "connectgaps": True,
    }


def curve(
    name: str, rounds: Sequence[int], series: Series, colour: str, dash: str = "solid"
) -> Json:
    """Draw a series over rounds; those without a number have no point."""
    x, y = thin(rounds, series.pad(len(rounds)))
    if series.known and stride_of(len(rounds)) == 1:
        x = [place for place, value in zip(x, y, strict=True) if value is not None]
        y = [value for value in y if value is not None]
    return line(name, x, y, colour, dash=dash)


def columns(
    name: str, x: Sequence[float], y: Sequence[float | None], colour: str, hover: str = "%{y}"
) -> Json:
    """Draw upright bars; see :func:`stack`."""
    return {
        "type": "bar",
        "name": escape_name(name),
        "x": list(x),
        "y": [round_digits(value) for value in y],
        "marker": {"color": colour},
        "hovertemplate": hover,
    }


def band(name: str, x: Sequence[float], low: Sequence[Any], high: Sequence[Any]) -> list[Json]:
    """Draw the range between two curves."""
    common = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}}
    lower = {"name": "", "showlegend": False, "hoverinfo": "skip"}
    upper = {"name": escape_name(name), "hovertemplate": "up to %{y:.4~g}"}
    return [
        {**common, "y": [round_digits(value) for value in low], **lower},
        {
            **common,
            "y": [round_digits(value) for value in high],
            "fill": "tonexty",
            "fillcolor": "@band",
            **upper,
        },
    ]


def bars(
    name: str,
    labels: Sequence[str],
    values: Sequence[float | None],
    colour: str = FIRST,
    **more: Any,
) -> Json:
    """Draw horizontal bars, the first on top; ``labels`` may come from outside."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": escape_name(name),
        "y": [escape_name(label) for label in labels],
        "x": [round_digits(value) for value in values],
        "marker": {"color": colour},
        **more,
    }


def marks(name: str, labels: Sequence[str], values: Sequence[float | None], **more: Any) -> Json:
    """Draw an upright line in each row of horizontal bars, such as what was planned."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape_name(name),
        "y": [escape_name(label) for label in labels],
        "x": [round_digits(value) for value in values],
        "marker": {
            "symbol": "line-ns-open",
            "size": 13,
            "color": SECOND,
            "line": {"width": 3, "color": SECOND},
        },
        **more,
    }


def plot_by_round(traces: Sequence[Json], *, log: bool = False, zero: bool = False) -> Json:
    """Make a figure over rounds."""
    axis: Json = {"type": "log"} if log else {}
    if zero:
        axis["rangemode"] = "tozero"
    longest: list[int] = max((trace["x"] for trace in traces), key=len, default=[])
    layout = {"xaxis": round_axis(longest), "yaxis": axis}
    return {"data": list(traces), "layout": {**layout, "hovermode": "x unified"}}


def stack(traces: Sequence[Json]) -> Json:
    """Make a figure of :func:`columns` over rounds, on top of one another."""
    figure = plot_by_round(traces, zero=True)
    figure["layout"] |= {"barmode": "stack", "bargap": 0.15}
    return figure


def round_axis(rounds: Sequence[int]) -> Json:
    """Make an axis whose ticks are whole rounds."""
    axis: Json = {"title": {"text": "round"}, "tickformat": "d"}
    if rounds and rounds[-1] - rounds[0] <= 10:
        axis["dtick"] = 1
    return axis


def row_names(names: Sequence[str], named: Callable[[str], str] = label) -> Json:
    """Make an axis of rows: whole names of :func:`escape_name` as keys, short ones as labels."""
    texts = [named(unescape(name)) for name in names]
    return {"type": "category", "tickvals": list(names), "ticktext": texts}


def plot_by_row(
    traces: Sequence[Json],
    unit: str,
    *,
    bars: int = 0,
    named: Callable[[str], str] = label,
    **layout: Any,
) -> Json:
    """Make a figure of horizontal bars with room for ``bars`` of them (0: one in each row).

    ``named`` makes the texts of its rows, see `row_names`.
    """
    names = list(dict.fromkeys(row for trace in traces for row in trace["y"]))
    height = max(_LEAST_PIXELS, _FRAME_PIXELS + _BAR_PIXELS * (bars or len(names)))
    axes = {
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {"range": [len(names) - 0.5, -0.5], **row_names(names, named)},
    }
    return {
        "data": list(traces),
        "layout": {**axes, "height": height, "barmode": "overlay", "bargap": 0.3, **layout},
    }


def plot_per_run(
    key: str, title: str, name: str, values: Mapping[str, float | None], unit: str
) -> Chart:
    """Make a chart with a horizontal bar per run; None is labelled "not measured"."""
    texts = ["" if value is not None else NOT_MEASURED for value in values.values()]
    heights = [value or 0.0 for value in values.values()]
    beside: Json = {"text": texts, "textposition": "outside", "cliponaxis": False}
    traces = [bars(name, list(values), heights, **beside)]
    return Chart(key=key, title=title, figure=plot_by_row(traces, unit, showlegend=False))


def note_not_measured(runs: Sequence[Named], traces: Sequence[Json]) -> str:
    """Say ``Not measured: A, B.`` of the runs without a curve; nothing where each has one."""
    there = {trace["name"] for trace in traces}
    left = [run.name for run in runs if escape_name(run.name) not in there]
    return f"{NOT_MEASURED.capitalize()}: {', '.join(left)}." if left else ""


def colour_of(place: int) -> str:
    """Return the colour of the curve or bars at this place."""
    return COLOURS[place % len(COLOURS)]


def draw_limit(figure: Json) -> Json:
    """Add a line at 100 to a figure of horizontal bars in percent."""
    line = {"color": MUTED, "dash": "dash", "width": 2}
    ends = {"type": "line", "x0": 100, "x1": 100, "y0": 0, "y1": 1, "yref": "paper"}
    layout = {**figure["layout"], "shapes": [{**ends, "line": line}]}
    return {**figure, "layout": layout}


def round_digits(value: float | None) -> float | None:
    """Round to five digits: more than a screen shows, in fewer bytes."""
    return float(f"{value:.5g}") if value is not None and isfinite(value) else None


def format_number(value: float | None, digits: int = 4) -> str:
    """Format a number, "-" where there is none."""
    if value is None or not isfinite(value):
        return "-"
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e" in text and 1 <= abs(value) < 1e9 else text


def format_size(count: float | None) -> str:
    """Format bytes in the unit that fits."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def format_seconds(value: float | None) -> str:
    """Format a duration in the unit that fits."""
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, hours = value / 60, value / 3600
    return f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"
