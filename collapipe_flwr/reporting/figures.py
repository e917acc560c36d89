"""Common parts of all pictures: colours for all kinds of sight, whole rounds, legends outside.

Curves also differ by dashes and markers, so that none depends on colour alone. Of two curves that
coincide, the one drawn first is wider and shows on both sides of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collapipe_flwr.core.durable import write_file
from collapipe_flwr.core.errors import ConfigError, name_extra

if TYPE_CHECKING:  # matplotlib is an optional extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for all kinds of sight, without the yellow that white swallows, then
# others that differ from them.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"),
    *("#882255", "#999933", "#332288", "#7f7f7f", "#8c5a2b"),
)
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
_MARKERS = "osD^vPX*<>hp"
_DPI = 120
_WIDTH, _WIDER = 1.5, 3.0  # points
_NEAR = 0.015  # of the height of the picture: closer points look the same
_MARKED = 8  # times on a curve


def new_figure(inches: tuple[float, float], title: str) -> Figure:
    """Make an empty figure with a title."""
    with name_extra("plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=inches, layout="constrained")
    figure.suptitle(title, fontsize="large")
    return figure


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a picture."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def draw_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw curves, each wider for every later one on top of it; set the scale of the axes first."""
    shown = axes.yaxis.get_transform().transform
    heights = [shown(np.array(curve.y, float)).tolist() for curve in curves]
    covers = _covers([dict(zip(c.x, y, strict=True)) for c, y in zip(curves, heights, strict=True)])
    for number, curve in enumerate(curves):
        width = _WIDTH + _WIDER * covers[number]
        axes.plot(
            curve.x,
            curve.y,
            label=curve.label,
            color=colour(number),
            linestyle=_DASHES[number // len(COLOURS) % len(_DASHES)],
            linewidth=width,
            marker=_MARKERS[number % len(_MARKERS)],
            markersize=width + 4,
            markeredgecolor="white",
            markeredgewidth=0.5,
            markevery=max(1, len(curve.x) // _MARKED),
            solid_capstyle="round",
        )


def _covers(curves: Sequence[Mapping[float, float]]) -> list[int]:
    """Count for each curve (heights by x) the later ones close to it at most points."""
    heights = [y for curve in curves for y in curve.values()]
    near = _NEAR * (max(heights, default=0.0) - min(heights, default=0.0))

    def coincide(one: Mapping[float, float], other: Mapping[float, float]) -> bool:
        shared = one.keys() & other.keys()
        return 2 * sum(abs(one[x] - other[x]) <= near for x in shared) > len(shared)

    return [
        sum(coincide(curve, later) for later in curves[number + 1 :])
        for number, curve in enumerate(curves)
    ]


def write_plain_numbers(axes: Axes) -> None:
    """Write 600 and 1000 on a logarithmic axis, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    if axes.get_yscale() == "linear":
        return
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def colour(number: int) -> str:
    """Return the colour of the curve or bar with this number."""
    return COLOURS[number % len(COLOURS)]


def place_legend_outside(figure: Figure, axes: Axes) -> None:
    """Put the legend of ``axes`` beside all axes."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small", frameon=False)


def label_whole_rounds(axes: Axes) -> None:
    """Label the x axis with whole rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)


def write_picture(figure: Figure, path: Path) -> None:
    """Replace ``path``; raises ConfigError when it cannot be written."""
    if path.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"--plot {path}: its name must end in .png, .pdf or .svg, say")
    try:
        write_file(path, lambda written: figure.savefig(written, dpi=_DPI))
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error})") from error
