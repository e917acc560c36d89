"""The tables and the picture of docs/privacy.md from what ``collapipe bench privacy`` wrote.

    python -m benchmarks.privacy.document docs/results/privacy/*.json --into docs/privacy.md

Without --into the page's tables are printed. The picture lies beside the files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.privacy.report import least_depth, recovery
from collapipe_flwr.reporting import figures

Json = dict[str, Any]
RATES = (0.9, 0.75, 0.5, 0.25)  # asked for
PICTURE = "recovery.png"


def read(files: Sequence[Path]) -> list[Json]:
    """The studies of all files."""
    return [study for file in files for study in json.loads(file.read_text())["studies"]]


def tables(told: Sequence[Json]) -> dict[str, str]:
    """Every table of the page in Markdown, by name."""
    attacked = [study for study in told if "tokens" in study]
    made = {
        "labels": _labels(attacked),
        "updates": _updates(attacked),
        "controls": _controls(told),
    }
    for study in told:
        if "noise" in study:
            made["noise"] = _noise(study)
    for study in attacked:
        name = study["study"]["name"]
        made[f"tokens-{name}"], made[f"depth-{name}"] = _tokens(study), _depth(study)
    return {f"privacy-{name}": table for name, table in made.items()}


def rendered(text: str, told: Sequence[Json]) -> str:
    """The page with its tables as recorded."""
    for name, table in tables(told).items():
        before, mark, rest = text.partition(f"<!-- table {name} -->\n")
        if mark:
            text = f"{before}{mark}{table}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def _tokens(study: Json) -> str:
    rates = study["tokens"]["rates"]
    last = next(reversed(rates.values()))
    columns = [(attack, codec) for attack, by in last.items() for codec in by]
    rows = [
        [depth, *(_percent(by.get(attack, {}).get(codec)) for attack, codec in columns)]
        for depth, by in rates.items()
    ]
    return _markdown(["blocks", *(f"{attack} {codec}" for attack, codec in columns)], rows)


def _labels(told: Sequence[Json]) -> str:
    rows = []
    for study in told:
        labels, depths = study["labels"], study["labels"]["gradients"]
        for depth, rate in depths.items():
            hidden = _percent(labels["hidden"].get(depth))
            guess = _percent(labels["commonest"])
            rows.append([study["study"]["name"], depth, _percent(rate), hidden, guess])
    head = ["study", "blocks", "from gradients", "from hidden states", "most frequent label"]
    return _markdown(head, rows)


def _updates(told: Sequence[Json]) -> str:
    rows = [
        [
            study["study"]["name"],
            *(name, f"{update['words']:.2f}", f"{update['same_label']:.2f}"),
            f"{update['members']:.2f}",
            "-" if update["label_alone"] is None else f"{update['label_alone']:.2f}",
            f"{2 * update['deviations']['same label']:.2f}",
        ]
        for study in told
        for name, update in study["updates"].items()
    ]
    head = ["study", "update", "words", "members, same label", "members, all", "label alone", "±"]
    return _markdown(head, rows)


def _depth(study: Json) -> str:
    """Recovery beside seconds for every cut; a bench that was stopped has no seconds."""
    rates, seconds = recovery(study), study.get("seconds", {})
    rows = [
        [
            str(depth),
            _percent(rate),
            *(
                "no plan" if (s := by[str(depth)]) is None else f"{s:.1f}"
                for by in seconds.values()
            ),
        ]
        for depth, rate in rates.items()
    ]
    least = [(rate, least_depth(rates, rate)) for rate in RATES]
    told = (f"{_percent(rate)}: {'none' if depth is None else depth}" for rate, depth in least)
    table = _markdown(["trusted blocks", "tokens read at most", *seconds], rows)
    return f"{table}\n\nLeast depth for a recovery of at most {', '.join(told)}."


def _noise(study: Json) -> str:
    rows = [
        [
            f"{row['noise_multiplier']:g}",
            "none" if (spent := row["epsilon"]) is None else f"{spent:,.{0 if spent > 99 else 1}f}",
            *(_percent(row[name]) for name in ("accuracy", "nearest", "inverter")),
        ]
        for row in study["noise"]
    ]
    head = ["noise multiplier", "epsilon", "accuracy", "read by nearest", "read by inverter"]
    return _markdown(head, rows)


def _controls(told: Sequence[Json]) -> str:
    rows = [
        [
            study["study"]["name"],
            *(c["name"], f"{c['value']:.3f}", f"{c['least']:.3f} .. {c['most']:.3f}"),
            "yes" if c["held"] else "no",
        ]
        for study in told
        for c in study["controls"]
    ]
    return _markdown(["study", "control", "value", "bounds", "held"], rows)


def _percent(rate: float | None) -> str:
    return "" if rate is None else f"{100 * rate:.0f} %"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(told: Sequence[Json], path: Path) -> None:
    """Recovery by depth, a panel per study and a curve per attack at both ends of the codecs."""
    told = [study for study in told if "tokens" in study]
    figure = figures.new_figure((4.5 * len(told) + 1.5, 3.5), "")
    panels = list(figure.subplots(1, len(told), squeeze=False).flat)
    for axes, study in zip(panels, told, strict=True):
        axes.set(title=study["study"]["name"], ylim=(0, 1.03), xlabel="blocks before the link")
        axes.set_ylabel("share of tokens read")
        figures.draw_curves(axes, list(_curves(study)))
        axes.grid(alpha=0.3)
    figures.place_legend_outside(figure, panels[-1])
    figures.write_picture(figure, path)


def _curves(study: Json) -> Iterator[figures.Curve]:
    rates = study["tokens"]["rates"]
    for attack, codecs in next(reversed(rates.values())).items():
        for codec in sorted(codecs.keys() & {"fp32", "int4"}):
            known = {int(d): by[attack][codec] for d, by in rates.items() if attack in by}
            yield figures.Curve(f"{attack}, {codec}", list(known), list(known.values()))


def main() -> None:
    """Print the tables, or put them into the page and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    told = read(options.files)
    if options.into is None:
        print("\n\n".join(tables(told).values()))
        return
    page = options.into.read_text(encoding="utf-8")
    options.into.write_text(rendered(page, told), encoding="utf-8")
    draw(told, options.files[0].parent / PICTURE)


if __name__ == "__main__":
    main()
