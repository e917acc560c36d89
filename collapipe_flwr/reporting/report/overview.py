"""A run at a glance: its tiles, its incidents, its settings and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collapipe_flwr.reporting.report import charts
from collapipe_flwr.reporting.report.charts import Chart, Section, Table, number, seconds, size
from collapipe_flwr.reporting.report.energy import spent
from collapipe_flwr.reporting.report.memory import peaks
from collapipe_flwr.reporting.report.run_data import KINDS, RunData
from collapipe_flwr.reporting.report.series import MOST_COLUMNS, stride_of, thinned

_INCIDENTS = {  # by kind
    "lost": "cluster lost",
    "recovered": "device lost, replayed",
    "quarantined": "device quarantined",
    "retry": "round repeated",
    "late": "late update",
    "remark": "remark",
    "failure": "failure",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One number, large, with what it means."""

    title: str
    value: str
    note: str = ""
    warning: bool = False


def tiles(run: RunData) -> list[Tile]:
    """The most important numbers of a run."""
    found = [_status(run), _metric(run), _time(run), _traffic(run), _clusters(run)]
    found += [_energy(run), _memory(run), _prediction(run)]
    incidents = Tile(title="Incidents", value=str(len(run.incidents)), note=counts_text(run))
    return [*(tile for tile in found if tile is not None), incidents]


def _status(run: RunData) -> Tile:
    status = str(run.summary.get("status", "unknown"))
    done, asked = len(run.rounds), run.summary.get("rounds_asked")
    return Tile(
        title="Run",
        value=status,
        note=f"{done} of {asked} rounds" if asked else f"{done} rounds",
        warning=status not in ("completed", "running"),
    )


def _metric(run: RunData) -> Tile | None:
    metric = run.summary.get("metric")
    if not metric:
        return None
    before = f"untrained {number(metric.get('initial'), 3)}, on unseen examples"
    return Tile(title=str(metric["name"]), value=number(metric.get("final"), 3), note=before)


def _time(run: RunData) -> Tile | None:
    wall = run.summary.get("wall_s")
    if wall is None:
        return None
    rounds = run.numbers["latency_s"].known
    kind = "measured" if run.measured else "simulated"
    mean = f"{kind}: {seconds(sum(rounds) / len(rounds))} a round" if rounds else ""
    return Tile(title="Wall-clock time", value=seconds(wall), note=mean)


def _traffic(run: RunData) -> Tile | None:
    total = sum(sum(run.bytes[kind].known) for kind in KINDS if kind != "spared")
    if not total:
        return None
    flower = size(sum(run.bytes["flower"].known))
    return Tile(title="Traffic", value=size(total), note=f"{flower} of it through Flower")


def _clusters(run: RunData) -> Tile | None:
    if not run.clusters:
        return None
    members = [name for name in run.devices if not name.endswith("/edge")]
    devices = len([name for name in members if name not in run.control_units])
    note = f"{devices} devices, {len(run.control_units)} control units"
    return Tile(title="Clusters", value=str(len(run.clusters)), note=note)


def _energy(run: RunData) -> Tile | None:
    limited = [each for each in spent(run) if each.share is not None]
    if not limited:
        return None
    worst = limited[0]
    over = sum(each.over for each in limited)
    return Tile(
        title="Energy, worst device",
        value=f"{100 * (worst.share or 0):.0f} % of budget",
        note=f"{over} of {len(limited)} devices over budget",
        warning=over > 0,
    )


def _memory(run: RunData) -> Tile | None:
    fullest = next(iter(peaks(run)), None)
    if fullest is None:
        return None
    if fullest.share is None:
        return Tile(title="Memory, largest peak", value=size(fullest.most), note=fullest.name)
    return Tile(
        title="Memory, fullest device",
        value=f"{100 * fullest.share:.0f} % of limit",
        note=f"{fullest.name}, {size(fullest.most)}",
        warning=fullest.share > 1,
    )


def _prediction(run: RunData) -> Tile | None:
    error = run.summary.get("prediction_error")
    if error is None:
        return None
    value = f"{100 * error:.1f} %"
    return Tile(title="Prediction error", value=value, note="of a round, in the median")


def compared_overview(runs: Sequence[RunData]) -> Section:
    """One column for each run."""
    found = [{tile.title: tile for tile in tiles(run)} for run in runs]
    titles = dict.fromkeys(title for each in found for title in each)
    rows = [[title, *(_cell(each.get(title)) for each in found)] for title in titles]
    table = Table(title="At a glance", head=["", *(run.name for run in runs)], rows=rows)
    return Section(key="overview", title="Overview", tables=[table])


def _cell(tile: Tile | None) -> str:
    if tile is None:
        return "-"
    return f"{tile.value} ({tile.note})" if tile.note else tile.value


def settings(run: RunData) -> Section:
    """Two tables of keys and values."""
    versions, config = _rows(run.summary.get("versions") or {}), _rows(run.config)
    title = f"Run-config, {len(config)} keys"
    tables = [
        Table(title="Versions", head=["package", "version"], rows=versions),
        Table(title=title, head=["key", "value"], rows=config, folded=True),
    ]
    kept = [table for table in tables if table.rows]
    return Section(key="settings", title="Settings and versions", tables=kept)


def _rows(values: Mapping[str, object]) -> list[list[str]]:
    return [[key, _text(value)] for key, value in values.items()]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "(empty)" if value == "" else str(value)


def compared_settings(runs: Sequence[RunData]) -> Section:
    """What differs."""
    tables = [
        *_differing("Run-config", runs, [run.config for run in runs]),
        *_differing("Versions", runs, [run.summary.get("versions") or {} for run in runs]),
    ]
    empty = "Nothing: all runs have the same settings and versions, or recorded none."
    return Section(key="settings", title="What differs", tables=tables, empty=empty)


def _differing(
    title: str, runs: Sequence[RunData], values: Sequence[Mapping[str, object]]
) -> list[Table]:
    own = ("run-name", "output-dir", "resume", "train.state-dir")
    keys = dict.fromkeys(key for each in values for key in each if key not in own)
    found = [[key, *(_text(each.get(key, "-")) for each in values)] for key in keys]
    rows = [row for row in found if len(set(row[1:])) > 1]
    head = ["key", *(run.name for run in runs)]
    return [Table(title=title, head=head, rows=rows)] if rows else []


def incidents(run: RunData) -> Section:
    """Counts by round and kind, and the newest sentences."""
    if not run.incidents:
        empty = "None: every cluster replied in every round."
        return Section(key="incidents", title="Incidents", empty=empty)
    head = ["round", "kind", "cluster", "what"]
    rows = [
        [str(each.round_index), _label(each.kind), each.cluster, each.text]
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
    """``cluster lost: 2, late update: 1``."""
    counts = Counter(incident.kind for incident in run.incidents)
    return ", ".join(f"{_label(kind)}: {count}" for kind, count in counts.most_common())


def _incidents_by_round(run: RunData) -> Chart:
    counts = Counter((incident.kind, incident.round_index) for incident in run.incidents)
    kinds = [kind for kind in _INCIDENTS if any(kind == found for found, _ in counts)]
    kinds += sorted({kind for kind, _ in counts} - set(kinds))
    traces = []
    for place, kind in enumerate(kinds):
        values = [float(counts[kind, index]) for index in run.rounds]
        x, y = thinned(run.rounds, values, MOST_COLUMNS, of=sum)
        traces.append(charts.columns(_label(kind), x, y, charts.colour_of(place)))
    figure = charts.stacked(traces)
    figure["layout"]["xaxis"] |= {"range": [run.rounds[0] - 0.6, run.rounds[-1] + 0.6]}
    if max(Counter(each.round_index for each in run.incidents).values()) <= 6:
        figure["layout"]["yaxis"] |= {"dtick": 1}
    stride = stride_of(len(run.rounds), MOST_COLUMNS)
    note = f"Each bar counts {stride} rounds." if stride > 1 else ""
    return Chart(key="incidents", title="Incidents by round", note=note, figure=figure)
