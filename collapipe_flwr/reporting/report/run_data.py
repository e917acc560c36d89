"""The data of a report: a run's summary, and curves from its events, read one by one.

A run of 1,000 rounds on 1,000 devices writes hundreds of megabytes of events, so
:meth:`RunData.add` keeps what figures need and no event. Totals of energy, memory and links are
the summary's. Events of earlier versions lack some keys; their values stay empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collapipe_flwr.core.errors import RunError
from collapipe_flwr.core.incident import LOST, Incident
from collapipe_flwr.reporting import run_directory
from collapipe_flwr.reporting.events import (
    control_unit_role,
    holders,
    is_early,
)
from collapipe_flwr.reporting.report.series import Series

Json = Mapping[str, Any]
Placed = tuple[str, int, int]  # device, first block, stop block
KINDS = ("d2d", "d2e", "flower", "weights", "spared")  # of bytes
_NUMBERS = (
    *("loss", "clusters_loss", "prequential_loss", "fresh_examples"),
    *("wall_s", "evaluation_s", "latency_s", "predicted_latency_s"),
)


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
        self._known: dict[Placed, Placed] = {}  # each segment once

    @property
    def metric(self) -> str:
        """Name of the task's metric."""
        return str(self.summary.get("metric", {}).get("name", "loss"))

    @property
    def untrained(self) -> Mapping[str, float]:
        """Metrics before the first round, as far as they are known."""
        return run_directory.untrained_metrics(self.summary)

    @property
    def budget_j(self) -> Mapping[str, float | None]:
        """Joules that a device may spend per round; None without a limit."""
        return self.summary.get("energy", {}).get("budget_j") or {}

    @property
    def mean_j(self) -> Mapping[str, float]:
        """Joules that a device spent per round; rounds without work count as 0."""
        return self.summary.get("energy", {}).get("mean_j") or {}

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
        for name in event.get("energy_j", {}):
            self.device(name)
        for name, joules in event.get("queues_j", {}).items():
            self.device(name).queue_j.put(place, joules)
        self.incidents += incidents_of(event)

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

    def _add_cluster(self, place: int, name: str, told: Json) -> None:
        data = self.clusters[name]
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
