"""What all pictures share: colours that everybody can tell apart, whole rounds, legends outside.

Curves also differ by dashes and markers, so that none depends on colour alone. Where two of them
coincide, the one that is drawn first is wider and shows on both sides of the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from collapipe_flwr.core.durable import write_file
from collapipe_flwr.core.errors import ConfigError, extra

if TYPE_CHECKING:  # matplotlib is an optional extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for all kinds of sight, without the yellow that white swallows.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)))
_MARKERS = "osD^vPX*<>hp"
_DPI = 120
_WIDTH, _WIDER = 1.5, 3.0  # points
_NEAR = 0.015  # of the height of the picture: closer points look the same
_MARKED = 8  # times on a curve


def new_figure(inches: tuple[float, float], title: str, caption: str = "") -> Figure:
    """An empty figure with a title, and smaller words below it that say what it is of."""
    with extra("plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=inches, layout="constrained")
    figure.suptitle(title, fontsize="large")
    if caption:
        figure.supxlabel(caption, fontsize="small", color="#555555")
    return figure


@dataclass(frozen=True, slots=True)
class Curve:
    """One of the curves of a picture."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def draw_curves(axes: Axes, curves: Sequence[Curve]) -> None:
    """Draw them in their order, each wider for every later one on top of it.

    The scale of the axes must be set.
    """
    covers = _covers([_heights(axes, curve) for curve in curves])
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


def _heights(axes: Axes, curve: Curve) -> dict[float, float]:
    """By x, as high as the scale of the axes shows them."""
    shown = axes.yaxis.get_transform().transform(np.array(curve.y, float))
    return dict(zip(curve.x, shown.tolist(), strict=True))


def _covers(curves: Sequence[Mapping[float, float]]) -> list[int]:
    """For each curve, how many later ones can hardly be told apart from it at most points."""
    heights = [y for curve in curves for y in curve.values()]
    near = _NEAR * (max(heights, default=0.0) - min(heights, default=0.0))

    def coincide(one: Mapping[float, float], other: Mapping[float, float]) -> bool:
        shared = one.keys() & other.keys()
        return 2 * sum(abs(one[x] - other[x]) <= near for x in shared) > len(shared)

    return [
        sum(coincide(curve, later) for later in curves[number + 1 :])
        for number, curve in enumerate(curves)
    ]


def plain_numbers(axes: Axes) -> None:
    """Write 600 and 1000 on a logarithmic axis, not powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    if axes.get_yscale() == "linear":
        return
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axes.get_yscale() == "log":
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))


def colour(number: int) -> str:
    """Of the curve or the bar with this number."""
    return COLOURS[number % len(COLOURS)]


def legend_outside(figure: Figure, axes: Axes) -> None:
    """Name the curves of ``axes`` beside all axes, where no curve can be."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize="small", frameon=False)


def whole_rounds(axes: Axes) -> None:
    """Count rounds in whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)


def write_picture(figure: Figure, path: Path) -> None:
    """Replace ``path``; raises ConfigError when it cannot be written."""
    try:
        write_file(path, lambda written: figure.savefig(written, dpi=_DPI))
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written ({error})") from error
