"""How a run was started and by which versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from collapipe_flwr.reporting.report.charts import Section, Table
from collapipe_flwr.reporting.report.run_data import RunData


def settings(run: RunData) -> Section:
    """Two tables of keys and values."""
    tables = [
        Table(
            title="Versions",
            head=["package", "version"],
            rows=_rows(run.summary.get("versions") or {}),
        ),
        Table(
            title=f"Run-config, {len(run.config)} keys",
            head=["key", "value"],
            rows=_rows(run.config),
            folded=True,
        ),
    ]
    return Section(
        key="settings", title="Settings and versions", tables=[t for t in tables if t.rows]
    )


def _rows(values: Mapping[str, object]) -> list[list[str]]:
    return [[key, _text(value)] for key, value in values.items()]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


def compared_settings(runs: Sequence[RunData]) -> Section:
    """What differs."""
    return Section(
        key="settings",
        title="What differs",
        tables=[
            *_differing("Run-config", runs, [run.config for run in runs]),
            *_differing("Versions", runs, [run.summary.get("versions") or {} for run in runs]),
        ],
        empty="Nothing: all runs have the same settings and versions, or recorded none.",
    )


def _differing(
    title: str, runs: Sequence[RunData], values: Sequence[Mapping[str, object]]
) -> list[Table]:
    own = ("run-name", "output-dir", "resume", "train.state-dir")
    keys = dict.fromkeys(key for each in values for key in each if key not in own)
    rows = [
        [key, *(_text(each.get(key, "-")) for each in values)]
        for key in keys
        if len({_text(each.get(key, "-")) for each in values}) > 1
    ]
    head = ["key", *(run.name for run in runs)]
    return [Table(title=title, head=head, rows=rows)] if rows else []
