"""What holds for every picture, by its structure."""

from __future__ import annotations

from typing import Any


def assert_readable(figure: Any) -> None:
    """Legends cover nothing, rounds are whole, every curve shows, nothing leaves the paper."""
    figure.draw_without_rendering()
    paper = figure.bbox
    for legend in figure.legends:
        box = legend.get_window_extent()
        for axes in figure.axes:
            assert not box.overlaps(axes.get_window_extent())
        assert paper.x0 <= box.x0 and box.x1 <= paper.x1 and box.y1 <= paper.y1
    for axes in (a for a in figure.axes if a.axison):
        assert axes.get_legend() is None
        if axes.get_xlabel() == "round":
            assert all(float(tick).is_integer() for tick in axes.get_xticks())
        for number, line in enumerate(axes.lines):
            assert line.get_visible()
            for later in axes.lines[number + 1 :]:
                if line.get_xydata().tolist() == later.get_xydata().tolist():
                    assert line.get_linewidth() > later.get_linewidth() + 2
