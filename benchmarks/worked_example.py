"""Write docs/tutorials/worked-example.md from a run of the demo: what it printed, and pictures.

    python benchmarks/worked_example.py run      # the demo; keeps its output and its events
    python benchmarks/worked_example.py write    # output and pictures of the page
    python benchmarks/worked_example.py print    # the page as it should be

What stands between ``<!-- shown NAME -->`` and ``<!-- end -->`` is a piece of the output.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from collapipe_flwr.core.processes import open_lifeline
from collapipe_flwr.reporting.figures import Curve, draw_curves, label_whole_rounds, new_figure
from collapipe_flwr.reporting.report.placement import draw_blocks
from collapipe_flwr.reporting.run_data import RunData, read_run
from collapipe_flwr.reporting.run_directory import EVENTS

if TYPE_CHECKING:  # matplotlib is an optional extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PAGE, RECORD = ROOT / "docs/tutorials/worked-example.md", ROOT / "docs/tutorials/worked-example"
COMMAND = ("run", ".", "--federation-config", "sim.toml")  # that of `make demo`
CONSOLE, ANSWERS, SUMMARY = "console.txt", "answers.txt", "summary.json"
_SHOWN = re.compile(r"(<!-- shown (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_ROUND = re.compile(r"round +\d+/")


def run() -> None:
    """Run what the page tells the reader to run, and keep what it shows."""
    with tempfile.TemporaryDirectory(prefix="worked-example-") as folder:
        output_dir = Path(folder) / "runs"
        printed = _output(["-m", "collapipe_flwr.cli.child", *COMMAND, "--output-dir", output_dir])
        (run_dir,) = output_dir.iterdir()
        keep(run_dir, printed)


def keep(run_dir: Path, printed: str) -> None:
    """Record a run that is completed, what it printed, and what its model answers."""
    RECORD.mkdir(exist_ok=True)
    where = re.compile(rf"\S+(?=/{re.escape(run_dir.name)})")
    (RECORD / CONSOLE).write_text(where.sub("runs", printed), encoding="utf-8")
    for name in (EVENTS, SUMMARY):
        (RECORD / name).write_bytes((run_dir / name).read_bytes())
    (code,) = _CODE.findall(PAGE.read_text(encoding="utf-8"))
    answers = _output(["-c", code.replace("runs/RUN", str(run_dir))])
    (RECORD / ANSWERS).write_text(answers, encoding="utf-8")


def _output(arguments: list[str | Path]) -> str:
    with open_lifeline() as stdin:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, stdin=stdin, stdout=subprocess.PIPE, check=True, cwd=ROOT, text=True
        ).stdout


def shown(name: str) -> list[str]:
    """Lines of the recorded output: ``start``, ``rounds`` (two and the last), ``end``, answers."""
    if name == "answers":
        return (RECORD / ANSWERS).read_text(encoding="utf-8").splitlines()
    lines = (RECORD / CONSOLE).read_text(encoding="utf-8").splitlines()
    heads = [number for number, line in enumerate(lines) if _ROUND.match(line)]
    last = next(n for n in range(heads[-1] + 1, len(lines)) if not lines[n].startswith(" "))
    pieces = {
        "start": lines[: heads[0]],
        "rounds": [*lines[heads[0] : heads[2]], "...", *lines[heads[-1] : last]],
        "end": lines[last:],
    }
    return [line.rstrip() for line in pieces[name]]


def rendered(text: str) -> str:
    """The page with every piece of the output as it was recorded."""

    def piece(found: re.Match[str]) -> str:
        lines = "\n".join(shown(found[2]))
        return f"{found[1]}\n```text\n{lines}\n```\n\n{found[3]}"

    return _SHOWN.sub(piece, text)


def pictures() -> Iterator[tuple[str, Figure]]:
    """Every picture of the page by the name of its file."""
    data = read_run(RECORD, "demo")
    yield "learning.svg", _learning(data)
    yield "placement.svg", _placement(data)


def _learning(data: RunData) -> Figure:
    figure = new_figure((7.5, 3.0), "")
    losses, metric = figure.subplots(1, 2)
    summary = json.loads((RECORD / SUMMARY).read_text(encoding="utf-8"))
    rounds = [float(index) for index in data.rounds]
    for axes, title, names in ((losses, "loss", ("training", "test")), (metric, data.metric, ())):
        axes.set(title=title, xlim=(0, rounds[-1] + 0.2))
        curves = [Curve("test", [0.0, *rounds], _tested(data, summary["untrained"], title))]
        if names:
            curves.insert(0, Curve("training", rounds, data.numbers["loss"].known))
        axes.set_ylim(0, 1.05 * max(value for curve in curves for value in curve.y))
        draw_curves(axes, curves)
        label_whole_rounds(axes)
        axes.legend(frameon=False)
    return figure


def _tested(data: RunData, untrained: dict[str, float], name: str) -> list[float]:
    return [untrained[name], *data.metrics[name].known]


def _placement(data: RunData) -> Figure:
    names = sorted(data.clusters)
    figure = new_figure((7.5, 1.9 * len(names)), "")
    for axes, name in zip(figure.subplots(len(names), 1, squeeze=False).flat, names, strict=True):
        _draw_blocks(axes, data, name)
    return figure


def _draw_blocks(axes: Axes, data: RunData, cluster: str) -> None:
    (table,) = draw_blocks(data, cluster)["data"]
    values = [[float("nan") if z is None else z for z in row] for row in table["z"]]
    shades = {"cmap": "Blues", "vmin": -1, "vmax": 1.6 * data.blocks}
    axes.pcolormesh(values, edgecolors="white", linewidth=2, **shades)
    for row, texts in enumerate(table["text"]):
        for column, text in enumerate(texts):
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize="small")
    axes.set(title=cluster, xlabel="round")
    axes.set_xticks([place + 0.5 for place in range(len(data.rounds))], [*map(str, data.rounds)])
    axes.set_yticks([place + 0.5 for place in range(len(table["y"]))], table["y"])
    axes.invert_yaxis()
    axes.tick_params(length=0)


def write() -> None:
    """Output and pictures of the page."""
    import matplotlib as mpl

    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    # Text stays text; the same run draws the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "worked-example"}):
        for name, figure in pictures():
            figure.savefig(RECORD / name, metadata={"Date": None})


def main(arguments: list[str]) -> None:
    """Dispatch; see the head of this file."""
    match arguments:
        case ["run"]:
            run()
        case ["write"]:
            write()
        case ["print"]:
            print(rendered(PAGE.read_text(encoding="utf-8")), end="")
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
