"""A run at a glance: its tiles, its incidents, its settings and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from collapipe_flwr.reporting.events import KEPT_FROM, KINDS, describe_spared
from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import (
    Chart,
    Section,
    Table,
    format_number,
    format_seconds,
    format_size,
)
from collapipe_flwr.reporting.report.energy import list_spent
from collapipe_flwr.reporting.report.memory import peaks
from collapipe_flwr.reporting.report.times import name_kind
from collapipe_flwr.reporting.run_data import MOST_COLUMNS, RunData, stride_of, thin

_INCIDENTS = {  # by kind
    "lost": "cluster lost",
    "recovered": "device lost, replayed",
    "quarantined": "device quarantined",
    "retry": "round repeated",
    "late": "late update",
    "remark": "remark",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number, large, with what it means."""

    title: str
    value: str
    note: str = ""
    warning: bool = False


def tiles(run: RunData) -> list[Tile]:
    """Return the most important numbers of a run."""
    return [*_outcome(run), *_machines(run)]


def _outcome(run: RunData) -> Iterator[Tile]:
    summary, done = run.summary, len(run.rounds)
    status, asked = str(summary.get("status", "unknown")), summary.get("rounds_asked")
    note = f"{done} of {asked} rounds" if asked else f"{done} rounds"
    failed = status not in ("completed", "running")
    yield Tile(title="Run", value=status, note=note, warning=failed)
    if metric := summary.get("metric"):
        note = f"untrained {format_number(metric.get('initial'), 3)}, on unseen examples"
        value = format_number(metric.get("final"), 3)
        yield Tile(title=str(metric["name"]), value=value, note=note)
    if spent := run.spent:
        most = max(spent, key=lambda name: spent[name])
        bound = run.config.get("privacy.max-epsilon")
        note = f"{most}, of {bound:g} allowed" if bound else most
        yield Tile(title="Epsilon, highest", value=format_number(spent[most], 3), note=note)
    if (wall_s := summary.get("wall_s")) is not None:
        kind, rounds = name_kind(run), run.numbers["latency_s"].known
        note = f"{kind}: {format_seconds(fmean(rounds))} a round" if rounds else ""
        yield Tile(title="Wall-clock time", value=format_seconds(wall_s), note=note)
    if traffic := sum(sum(run.bytes[kind].known) for kind in KINDS if kind != "spared"):
        note = f"{format_size(sum(run.bytes['flower'].known))} of it through Flower"
        yield Tile(title="Traffic", value=format_size(traffic), note=note)
    if run.spared:
        value = format_seconds(run.spared["seconds"])
        yield Tile(title="Spared by kept states", value=value, note=describe_spared(run.spared))


def _machines(run: RunData) -> Iterator[Tile]:
    if run.clusters:
        members = [name for name in run.devices if not name.endswith("/edge")]
        devices = len([name for name in members if name not in run.control_units])
        note = f"{devices} devices, {len(run.control_units)} control units"
        yield Tile(title="Clusters", value=str(len(run.clusters)), note=note)
    if shares := [each.share for each in list_spent(run) if each.share is not None]:
        over = sum(share > 1 for share in shares)
        value = f"{100 * shares[0]:.0f} % of budget"
        note, early = f"{over} of {len(shares)} devices over budget", run.is_early
        if over and early:
            note = f"{over} of {len(shares)} devices above so far: {KEPT_FROM} rounds keep budgets"
        warning = over > 0 and not early
        yield Tile(title="Energy, worst device", value=value, note=note, warning=warning)
    for fullest in peaks(run)[:1]:
        title = f"Memory, {'measured' if fullest.measured else 'planned'} peak"
        most, share = format_size(fullest.known), fullest.share
        if share is None:
            yield Tile(title=title, value=most, note=fullest.name)
        else:
            value, note = f"{100 * share:.0f} % of allowed", f"{fullest.name}, {most}"
            if fullest.measured and (planned := fullest.share_of(fullest.planned)) is not None:
                note += f"; planned peak {100 * planned:.0f}\N{NO-BREAK SPACE}%"
            yield Tile(title=title, value=value, note=note, warning=share > 1)
    if (error := run.summary.get("prediction_error")) is not None:
        value, note = f"{100 * error:.1f} %", "of a round, in the median"
        yield Tile(title="Prediction error", value=value, note=note)
    yield Tile(title="Incidents", value=str(len(run.incidents)), note=counts_text(run))


def compare_overview(runs: Sequence[RunData]) -> Section:
    """Show the tiles of all runs in a table with a column per run."""
    found = [
        {t.title: f"{t.value} ({t.note})" if t.note else t.value for t in tiles(run)}
        for run in runs
    ]
    titles = dict.fromkeys(title for each in found for title in each)
    rows = [[title, *(each.get(title, "-") for each in found)] for title in titles]
    table = Table(title="At a glance", head=["", *(run.name for run in runs)], rows=rows)
    return Section(key="overview", title="Overview", tables=[table])


def settings(run: RunData) -> Section:
    """Show versions and run-config as tables of keys and values."""
    versions = list((run.summary.get("versions") or {}).items())
    config = [[key, _text(value)] for key, value in run.config.items()]
    title = f"Run-config, {len(config)} keys"
    tables = [
        Table(title="Versions", head=["package", "version"], rows=versions),
        Table(title=title, head=["key", "value"], rows=config, folded=True),
    ]
    kept = [table for table in tables if table.rows]
    return Section(key="settings", title="Settings and versions", tables=kept)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


def compare_settings(runs: Sequence[RunData]) -> Section:
    """Show the settings and versions in which runs differ."""
    tables = [
        *_differences("Run-config", runs, [run.config for run in runs]),
        *_differences("Versions", runs, [run.summary.get("versions") or {} for run in runs]),
    ]
    empty = "Nothing: all runs have the same settings and versions."
    if not any(run.config for run in runs):
        empty = "Unknown: no run recorded its settings."
    return Section(key="settings", title="What differs", tables=tables, empty=empty)


def _differences(
    title: str, runs: Sequence[RunData], values: Sequence[Mapping[str, object]]
) -> list[Table]:
    own = ("run-name", "output-dir", "resume", "train.state-dir")
    keys = dict.fromkeys(key for each in values for key in each if key not in own)
    found = [[key, *(_text(each.get(key, "-")) for each in values)] for key in keys]
    rows = [row for row in found if len(set(row[1:])) > 1]
    head = ["key", *(run.name for run in runs)]
    return [Table(title=title, head=head, rows=rows)] if rows else []


def incidents(run: RunData) -> Section:
    """Show incidents: how many of each kind by round, and a table, newest first."""
    if not run.incidents:
        empty = "None: every cluster replied in every round."
        return Section(key="incidents", title="Incidents", empty=empty)
    head = ["round", "kind", "cluster", "what"]
    rows = [
        [str(each["round"]), _label(each["kind"]), each["cluster"], each["text"]]
        for each in reversed(run.incidents)
    ]
    title, rest = "What happened, newest first", "before these in events.jsonl"
    return Section(
        key="incidents",
        title="Incidents",
        text=counts_text(run),
        charts=[_incidents_by_round(run)],
        tables=[charts.long_table(title, head, rows, "incident", rest)],
    )


def _label(kind: str) -> str:
    return _INCIDENTS.get(kind, kind)


def counts_text(run: RunData) -> str:
    """Count incidents by kind: ``cluster lost: 2, late update: 1``."""
    counts = Counter(each["kind"] for each in run.incidents)
    return ", ".join(f"{_label(kind)}: {count}" for kind, count in counts.most_common())


def _incidents_by_round(run: RunData) -> Chart:
    counts = Counter((each["kind"], each["round"]) for each in run.incidents)
    kinds = [kind for kind in _INCIDENTS if any(kind == found for found, _ in counts)]
    kinds += sorted({kind for kind, _ in counts} - set(kinds))
    traces = []
    for place, kind in enumerate(kinds):
        values = [float(counts[kind, index]) for index in run.rounds]
        x, y = thin(run.rounds, values, MOST_COLUMNS, of=sum)
        traces.append(charts.columns(_label(kind), x, y, charts.colour_of(place)))
    figure = charts.stack(traces)
    figure["layout"]["xaxis"] |= {"range": [run.rounds[0] - 0.6, run.rounds[-1] + 0.6]}
    if max(Counter(each["round"] for each in run.incidents).values()) <= 6:
        figure["layout"]["yaxis"] |= {"dtick": 1}
    stride = stride_of(len(run.rounds), MOST_COLUMNS)
    note = f"Each bar counts {stride} rounds." if stride > 1 else ""
    return Chart(key="incidents", title="Incidents by round", note=note, figure=figure)
