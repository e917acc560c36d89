"""A run's rounds, folded: what summary, reports and the live page say of them.

A run of 1,000 rounds on 1,000 devices writes hundreds of megabytes of events, more than memory
holds, so :meth:`RunData.add` keeps curves and totals and no event.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.incident import LOST, Incident
from collapipe_flwr.reporting import run_directory
from collapipe_flwr.reporting.events import (
    KINDS,
    RoundEvent,
    control_unit_role,
    holders,
    is_early,
    replace_nonfinite,
)

Json = Mapping[str, Any]
Placed = tuple[str, int, int]  # device, first block, stop block
_NUMBERS = (
    *("loss", "clusters_loss", "prequential_loss", "fresh_examples"),
    *("wall_s", "evaluation_s", "latency_s", "predicted_latency_s"),
)
_RECENT = 5  # rounds, by which the next one is expected
MOST_COLUMNS = 100  # of a chart of bars
MOST_POINTS = 400  # of a curve: about one for every two pixels


class Series:
    """One number per round; NaN where there is none."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values = array("d")

    def put(self, place: int, value: float | None) -> None:
        """Set the number of the ``place``-th round; skipped rounds have none."""
        values = self.values
        if place >= len(values):
            values.extend([nan] * (place - len(values)))
            values.append(nan if value is None else value)
        else:
            values[place] = nan if value is None else value

    def pad(self, count: int) -> list[float]:
        """Return the numbers of ``count`` rounds; those after the last known are NaN."""
        return [*self.values, *[nan] * (count - len(self.values))]

    @property
    def known(self) -> list[float]:
        """The numbers of the rounds that have one."""
        return [value for value in self.values if not isnan(value)]

    @property
    def mean(self) -> float | None:
        known = self.known
        return fmean(known) if known else None

    @property
    def last(self) -> float | None:
        return next((value for value in reversed(self.values) if not isnan(value)), None)


def thin(
    rounds: Sequence[int],
    values: Sequence[float],
    most: int = MOST_POINTS,
    of: Callable[[Iterable[float]], float] = fmean,
) -> tuple[list[int], list[float | None]]:
    """Reduce to at most ``most`` points: ``of`` neighbouring rounds, placed at their last."""
    stride = stride_of(len(rounds), most)
    x, y = [], []
    for start in range(0, len(rounds), stride):
        group = [value for value in values[start : start + stride] if not isnan(value)]
        x.append(rounds[min(start + stride, len(rounds)) - 1])
        y.append(of(group) if group else None)
    return x, y


def stride_of(count: int, most: int = MOST_POINTS) -> int:
    """Return the rounds per point of a thinned curve."""
    return max(1, -(-count // most))


@dataclass(slots=True)
class ClusterData:
    """One cluster by round."""

    loss: Series = field(default_factory=Series)
    epsilon: Series = field(default_factory=Series)  # of its examples, spent so far
    predicted_s: Series = field(default_factory=Series)
    latency_s: Series = field(default_factory=Series)
    placed: dict[int, tuple[Placed, ...]] = field(default_factory=dict)  # by place of the round
    last_plan: Json = field(default_factory=dict)  # as in the event
    measured: bool = False  # by machines


@dataclass(slots=True)
class DeviceData:
    """One member of a cluster: its energy queue by round, and totals over the rounds."""

    cluster: str
    queue_j: Series = field(default_factory=Series)
    predicted_j: float = 0.0
    metered: bool = False
    planned_bytes: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    stage_rounds: int = 0


class RunData:
    """The data of one run's figures; grows by one event at a time."""

    def __init__(self, name: str, summary: Json | None = None, config: Json | None = None) -> None:
        self.name = name
        self.summary: Json = summary or {}
        self.config: Json = config or {}
        self.rounds: list[int] = []
        self.numbers: defaultdict[str, Series] = defaultdict(Series)  # loss, wall_s, ...
        self.metrics: defaultdict[str, Series] = defaultdict(Series)  # by the server
        self.clusters_metrics: defaultdict[str, Series] = defaultdict(Series)  # by the clusters
        self.bytes: dict[str, Series] = {kind: Series() for kind in KINDS}
        self.clusters: defaultdict[str, ClusterData] = defaultdict(ClusterData)
        self.devices: dict[str, DeviceData] = {}
        self.control_units: dict[str, str] = {}  # how they are called, see `role`
        self.policy: str | None = None  # of the last plan
        self.blocks = 0  # that were cut into segments
        self.incidents: list[Json] = []  # see `incidents_of`
        self.lost: defaultdict[str, list[int]] = defaultdict(list)  # rounds, by cluster
        self.energy_j: dict[str, float] = {}  # of all rounds, by member
        self.memory_bytes: dict[str, int] = {}  # peaks, by role
        self.hops: dict[tuple[str, ...], Json] = {}  # as in events, of all rounds
        self.spared: Counter[str] = Counter()  # sums of what caches of frozen blocks spared
        self.errors = array("d")  # |ln(predicted / real)| of clusters' rounds
        self.on_shares: Json | None = None  # the clusters' last scores, on their test shares
        self.last_plan: Json | None = None
        self._evaluated: list[int] = []  # places of rounds
        self._share = -1.0  # the largest of the model on one device
        self._caps: set[float | None] = set()  # on it
        self._known: dict[Placed, Placed] = {}  # each segment once

    @property
    def metric(self) -> str:
        """Name of the task's metric."""
        return str(self.summary.get("metric", {}).get("name", "loss"))

    @property
    def untrained(self) -> Mapping[str, float]:
        """Scores of the untrained model; older runs know the task's metric alone."""
        metric = self.summary.get("metric", {})
        known = {} if metric.get("initial") is None else {metric["name"]: metric["initial"]}
        return self.summary.get("untrained") or known

    @property
    def budget_j(self) -> Mapping[str, float | None]:
        """Joules that a device may spend per round; None without a limit."""
        return self.summary.get("energy", {}).get("budget_j") or {}

    def mean_j(self, budgets_j: Mapping[str, object]) -> dict[str, float]:
        """Return the joules per round of devices with and without a budget; no work counts as 0."""
        joules = {**dict.fromkeys(budgets_j, 0.0), **self.energy_j}
        return {device: j / max(len(self.rounds), 1) for device, j in joules.items()}

    @property
    def links(self) -> list[Json]:
        """The hops by codec, with the bytes and seconds of all rounds."""
        return list(self.hops.values())

    @property
    def memory_limit_bytes(self) -> Mapping[str, int]:
        """Bytes that plans may use of a device."""
        return self.summary.get("memory_limit_bytes") or {}

    @property
    def measured(self) -> bool:
        """Whether machines timed any round; else seconds and joules are simulated."""
        return any(cluster.measured for cluster in self.clusters.values())

    @property
    def is_early(self) -> bool:
        """Whether the run is too short for its energy budgets, see `events.is_early`."""
        return is_early(len(self.rounds), self.policy)

    def add(self, event: Json) -> None:
        """Add a round; raises KeyError for a value that is no event."""
        place = len(self.rounds)
        self.rounds.append(event["round_index"])
        for name in _NUMBERS:
            self.numbers[name].put(place, event.get(name))
        if event.get("metrics"):
            self._evaluated.append(place)
        for name, value in event.get("metrics", {}).items():
            self.metrics[name].put(place, value)
        for name, value in event.get("clusters_metrics", {}).items():
            self.clusters_metrics[name].put(place, value)
        for kind in KINDS:
            self.bytes[kind].put(place, event.get("bytes", {}).get(kind, 0))
        self._add_plan(place, event.get("plan") or {})
        for name, cluster in event.get("clusters", {}).items():
            self._add_cluster(place, name, cluster)
        for name, epsilon in event.get("epsilon", {}).items():
            self.clusters[name].epsilon.put(place, epsilon)
        for spared in event.get("spared", {}).values():
            self.spared.update(spared)
        for name, joules in event.get("energy_j", {}).items():
            self.device(name)
            self.energy_j[name] = self.energy_j.get(name, 0.0) + joules
        for role, size in event.get("memory_bytes", {}).items():
            self.memory_bytes[role] = max(self.memory_bytes.get(role, 0), size)
        for link in event.get("links", ()):
            self._add_link(link)
        for name in event.get("lost", ()):
            self.lost[name].append(event["round_index"])
        if (loss := event.get("clusters_loss")) is not None:
            self.on_shares = {"loss": loss, **event.get("clusters_metrics", {})}
        for name, joules in event.get("queues_j", {}).items():
            self.device(name).queue_j.put(place, joules)
        self.incidents += incidents_of(event)

    def scores(self, metric: str) -> list[float]:
        """Return one metric of the rounds that were evaluated."""
        values = self.metrics[metric].pad(len(self.rounds))
        return [values[place] for place in self._evaluated]

    def share_json(self, asked: float | None) -> dict[str, float | None] | None:
        """Return the largest share of the model's memory that plans gave a device, and its cap.

        The cap that was ``asked`` for is smaller than the other where no plan keeps it.
        """
        if not self._caps:
            return None
        caps = [cap for cap in self._caps if cap is not None]
        cap = max(caps) if len(caps) == len(self._caps) else None
        return {"most": self._share, "cap": cap, "asked": asked}

    @property
    def spent(self) -> dict[str, float]:
        """The epsilon that clusters which train privately have spent so far, by their names."""
        told = {name: cluster.epsilon.last for name, cluster in self.clusters.items()}
        return {name: epsilon for name, epsilon in told.items() if epsilon is not None}

    def device(self, name: str, cluster: str = "") -> DeviceData:
        """Return a member's data, made on first use; by default its name contains its cluster."""
        found = self.devices.get(name)
        if found is None:
            found = self.devices[name] = DeviceData(cluster or name.rpartition("/")[0])
        return found

    def role(self, name: str) -> str:
        """Return what a member is called: a control unit by its role, as in ``memory_bytes``."""
        return self.control_units.get(name, name)

    def _add_plan(self, place: int, plan: Json) -> None:
        self.policy = plan.get("policy", self.policy)
        self.last_plan = plan or self.last_plan
        for cluster in plan.get("clusters", ()):
            segments = (
                (name, segment["first_block"], segment["stop_block"])
                for segment in cluster["segments"]
                for name in holders(segment)
            )
            placed = tuple(self._known.setdefault(segment, segment) for segment in segments)
            self.blocks = max(self.blocks, placed[-1][2] if placed else 0)
            self.control_units |= control_unit_role(cluster)
            data = self.clusters[cluster["cluster_id"]]
            data.placed[place] = placed
            data.last_plan = cluster

    def _add_link(self, link: Json) -> None:
        key = tuple(link[part] for part in ("cluster", "sender", "receiver", "codec"))
        before = self.hops.get(key)
        if before is not None:  # planned rates are the latest
            joined = {way: _joined(before[way], link[way]) for way in ("forward", "backward")}
            link = {**link, **joined}
        self.hops[key] = link

    def _add_cluster(self, place: int, name: str, told: Json) -> None:
        data = self.clusters[name]
        if (error := told.get("error")) is not None:
            self.errors.append(abs(error))
        if (share := told.get("model_share")) is not None:
            self._share = max(self._share, share)
            self._caps.add(told["model_share_cap"])
        data.loss.put(place, told.get("loss"))
        data.predicted_s.put(place, told.get("predicted_s"))
        data.latency_s.put(place, told.get("latency_s"))
        data.measured |= bool(told.get("measured"))
        for stage, seen in told.get("stages", {}).items():
            device = self.device(stage if "/" in stage else f"{name}/edge", name)  # by its id
            planned_bytes = seen.get("planned_bytes")
            if planned_bytes and planned_bytes > device.planned_bytes:
                device.planned_bytes = planned_bytes
            predicted_s, measured_s = seen.get("predicted_s"), seen.get("measured_s")
            if predicted_s is not None and measured_s is not None:
                device.predicted_s += predicted_s
                device.measured_s += measured_s
                device.stage_rounds += 1
        for member, energy in told.get("energy", {}).items():
            device = self.device(member, name)
            device.predicted_j += energy.get("predicted_j") or 0.0
            device.metered = device.metered or energy.get("source") == "metered"


def _joined(before: Json, now: Json) -> dict[str, Any]:
    """Join what one direction of a hop carried."""
    count, seconds = before["bytes"] + now["bytes"], before["sending_s"] + now["sending_s"]
    rate = 8.0 * count / seconds if seconds > 0 else None
    return {**now, "bytes": count, "sending_s": seconds, "bit_per_s": rate}


def incidents_of(event: Json) -> list[dict[str, Any]]:
    """Return the incidents of a round, with the round's index."""
    index = event["round_index"]
    found = [{"round": index, **each} for each in event.get("incidents", ())]
    told = {each["cluster"] for each in found}
    lost = [name for name in event.get("lost", ()) if name not in told]
    why = "no result in this round"
    return found + [
        {"round": index, **asdict(Incident(kind=LOST, cluster=name, text=why))} for name in lost
    ]


def read_run(run_dir: Path, name: str = "") -> RunData:
    """Read the rounds of a run directory so far; raises RunError for a damaged file."""
    summary, config = run_directory.read_summary(run_dir), run_directory.read_config(run_dir)
    data = RunData(name or run_dir.resolve().name, summary, config)
    for number, event in enumerate(run_directory.iter_events(run_dir), start=1):
        try:
            data.add(event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{run_dir / run_directory.EVENTS}, line {number}: no event of a round "
                f"({error!r}); delete the line to go on without it"
            ) from error
    return data


@dataclass(slots=True, kw_only=True)
class RunStory:
    """The data of ``summary.json``: how a run was begun, and its rounds so far, as ``data``."""

    metric_name: str
    initial: Mapping[str, float] = field(default_factory=dict)
    energy_budget_j: Mapping[str, float]
    memory_limit_bytes: Mapping[str, int] = field(default_factory=dict)
    share_asked: float | None = None  # scheduler.max-model-share
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages, on the server
    rounds_asked: int | None = None
    notes: tuple[str, ...] = ()  # about the run as a whole
    data: RunData = field(default_factory=lambda: RunData(""))

    def add(self, event: RoundEvent) -> None:
        """Add a round."""
        self.data.add(event.as_json())

    @property
    def lost(self) -> dict[str, list[int]]:
        """The rounds that went on without a cluster, by cluster."""
        return dict(sorted(self.data.lost.items()))

    @property
    def never_trained(self) -> list[str]:
        """The clusters without which every round went on."""
        done = len(self.data.rounds)
        return [name for name, rounds in self.lost.items() if len(rounds) == done]

    def expected_wall_s(self, event: RoundEvent) -> float | None:
        """Predict the seconds of a round without its evaluation, before it begins.

        The planned latency of the slowest cluster, plus the median of what server, messages and
        aggregation took in the last rounds. None where no machines are timed.
        """
        timed = [each["measured"] for each in event.clusters.values()]
        if event.predicted_latency_s is None or not timed or not all(timed):
            return None
        numbers, count = self.data.numbers, len(self.data.rounds)
        columns = (numbers[name].pad(count) for name in ("wall_s", "evaluation_s", "latency_s"))
        recent = list(zip(*columns, strict=True))[-_RECENT:]
        besides = [wall - tested - took for wall, tested, took in recent if not isnan(took)]
        return event.predicted_latency_s + (median(besides) if besides else 0.0)

    def summary(self, *, status: str, wall_s: float, reason: str | None = None) -> dict[str, Any]:
        """Return the content of ``summary.json``."""
        data = self.data
        mean_j = data.mean_j(self.energy_budget_j)
        scored, curves = data.scores(self.metric_name), ("loss", "predicted_latency_s", "latency_s")
        loss, predicted_s, latency_s = (data.numbers[n].pad(len(data.rounds)) for n in curves)
        summary = {
            "status": status,
            "reason": reason,
            "rounds": len(data.rounds),
            "rounds_asked": self.rounds_asked,
            "notes": list(self.notes),
            "untrained": dict(self.initial),
            "lost": self.lost,
            "never_trained": self.never_trained,
            "metric": {
                "name": self.metric_name,
                "initial": self.initial.get(self.metric_name),
                "final": scored[-1] if scored else None,
                "curve": scored,
            },
            "clusters": data.on_shares,  # of the test set
            "loss": loss,
            "wall_s": round(wall_s, 3),
            "predicted_latency_s": predicted_s,
            "latency_s": latency_s,
            "prediction_error": median(data.errors) if data.errors else None,
            "energy": {"budget_j": dict(self.energy_budget_j), "mean_j": mean_j},
            "bytes": {kind: int(sum(series.values)) for kind, series in data.bytes.items()},
            "spared": dict(data.spared),
            "links": data.links,
            "peak_memory_bytes": dict(data.memory_bytes),
            "memory_limit_bytes": dict(self.memory_limit_bytes),
            "model_share": data.share_json(self.share_asked),
            "epsilon": data.spent,
            "versions": dict(self.versions),
            "plan": data.last_plan,
        }
        return dict(replace_nonfinite(summary))
