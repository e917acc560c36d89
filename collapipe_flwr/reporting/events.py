"""The report of a round and of a run, as values.

Keys of per-device mappings read ``cluster/device``; ``memory_bytes`` also has
``cluster/control-unit`` and ``cluster/edge`` (the cluster's decoder replica).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite, log, nan
from statistics import median
from typing import Any

from collapipe_flwr.core.domain import ClusterOutcome, ClusterPlan
from collapipe_flwr.core.incident import QUARANTINED, Incident
from collapipe_flwr.core.links import LinkConfig, LinkReport, LinkTraffic, sum_reports

_RECENT = 5  # rounds
KEPT_FROM = 10  # rounds: from then on, energy budgets hold
_PAYING = "dssda"  # the policy that pays back what is above them
# Of an event in a `RunStory`: most of it, which curves do not need.
_LEFT_OUT: dict[str, Any] = {
    **{key: {} for key in ("clusters", "energy_j", "queues_j", "memory_bytes")},
    **dict.fromkeys(("links", "incidents"), ()),
    "plan": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Bytes that crossed each class of link in one round, headers included."""

    d2d: int = 0  # control unit <-> devices
    d2e: int = 0  # last device <-> edge
    flower: int = 0  # arrays and records between the server and the control units
    weights: int = 0  # segments, control unit <-> devices that are machines of their own
    spared: int = 0  # of those, what did not travel because both sides had it


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundEvent:
    """One line of ``events.jsonl``."""

    round_index: int
    wall_s: float  # with its evaluation by the server
    metrics: Mapping[str, float]  # on unseen examples; empty when this round was not evaluated
    evaluation_s: float = 0.0  # of the wall time
    loss: float | None = None  # mean training loss, weighted by examples
    clusters_loss: float | None = None  # mean over the labels of the clusters' test shares
    clusters_metrics: Mapping[str, float] = field(default_factory=dict)  # on all shares together
    plan: Mapping[str, Any] | None = None
    predicted_latency_s: float | None = None  # by the plan
    predicted_wall_s: float | None = None  # see `RunStory.expected_wall_s`
    latency_s: float | None = None  # measured by machines; of simulated clusters, in the true world
    clusters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # see `cluster_json`
    energy_j: Mapping[str, float] = field(default_factory=dict)
    queues_j: Mapping[str, float] = field(default_factory=dict)
    bytes: LinkBytes = field(default_factory=LinkBytes)
    links: tuple[LinkReport, ...] = ()
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    lost: tuple[str, ...] = ()  # clusters that were away or whose round came to nothing
    fresh_examples: int = 0  # new ones of data.stream
    prequential_loss: float | None = None  # on them, before training on them
    epsilon: Mapping[str, float] = field(default_factory=dict)  # spent so far, by cluster

    @property
    def failures(self) -> tuple[Incident, ...]:
        """The incidents that cost the round something."""
        return tuple(each for each in self.incidents if each.kind != QUARANTINED)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for the event log; JSON knows no NaN, so a diverged number is null."""
        links = [link_json(link) for link in self.links]
        told = {"links": links, "failures": list(map(str, self.failures))}
        return dict(replace_nonfinite({**asdict(self), **told}))

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> RoundEvent:
        """Read what :meth:`as_json` wrote; a metric that was null is NaN again."""
        values: dict[str, Any] = dict(data)
        for name in ("metrics", "clusters_metrics"):
            scores = data.get(name, {}).items()
            values[name] = {key: nan if score is None else score for key, score in scores}
        values.pop("failures", None)  # read from incidents
        values["lost"] = tuple(data.get("lost", ()))
        values["incidents"] = tuple(Incident(**each) for each in data.get("incidents", ()))
        values["bytes"] = LinkBytes(**data["bytes"])
        values["links"] = tuple(link_of_json(link) for link in data.get("links", ()))
        return RoundEvent(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSums:
    """Totals of rounds by member and by hop, which is most of an event."""

    energy_j: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)  # peaks, by role
    links: tuple[LinkReport, ...] = ()
    errors: tuple[float, ...] = ()  # |ln(predicted / real)| of the latency
    model_share: float | None = None  # the largest
    share_caps: tuple[float | None, ...] = ()  # that differ
    plan: Mapping[str, Any] | None = None  # the last one

    def with_event(self, event: RoundEvent) -> RunSums:
        """Return the sums with one more round."""
        energy_j, memory_bytes = dict(self.energy_j), dict(self.memory_bytes)
        for device, joules in event.energy_j.items():
            energy_j[device] = energy_j.get(device, 0.0) + joules
        for role, size in event.memory_bytes.items():
            memory_bytes[role] = max(memory_bytes.get(role, 0), size)
        told = event.clusters.values()
        errors = (abs(each["error"]) for each in told if each.get("error") is not None)
        shares = [each for each in told if each.get("model_share") is not None]
        caps = dict.fromkeys((*self.share_caps, *(each["model_share_cap"] for each in shares)))
        known = () if self.model_share is None else (self.model_share,)
        return RunSums(
            energy_j=energy_j,
            memory_bytes=memory_bytes,
            links=sum_reports((*self.links, *event.links)),
            errors=(*self.errors, *errors),
            model_share=max((*known, *(each["model_share"] for each in shares)), default=None),
            share_caps=tuple(caps),
            plan=event.plan or self.plan,
        )

    def share_json(self, asked: float | None) -> dict[str, float | None] | None:
        """Return the largest share of the model's memory that plans gave a device, and its cap.

        The cap that was ``asked`` for is smaller than the other where no plan keeps it.
        """
        if self.model_share is None:
            return None
        caps = [cap for cap in self.share_caps if cap is not None]
        cap = max(caps) if len(caps) == len(self.share_caps) else None
        return {"most": self.model_share, "cap": cap, "asked": asked}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStory:
    """The data of ``summary.json`` but plans; grows by one event per round.

    A run of 1,000 rounds on 1,000 devices writes more events than memory holds, so `with_event`
    keeps of a round what a curve needs, and adds the rest to ``sums``.
    """

    metric_name: str
    initial: Mapping[str, float] = field(default_factory=dict)
    energy_budget_j: Mapping[str, float]
    memory_limit_bytes: Mapping[str, int] = field(default_factory=dict)
    share_asked: float | None = None  # scheduler.max-model-share
    versions: Mapping[str, str] = field(default_factory=dict)  # of packages, on the server
    events: tuple[RoundEvent, ...] = field(default=())
    rounds_asked: int | None = None
    notes: tuple[str, ...] = ()  # about the run as a whole
    sums: RunSums = RunSums()  # of what ``events`` leave out

    def with_event(self, event: RoundEvent) -> RunStory:
        """Return the story with one more round."""
        curve = replace(event, **_LEFT_OUT)
        return replace(self, events=(*self.events, curve), sums=self.sums.with_event(event))

    @property
    def lost(self) -> dict[str, list[int]]:
        """The rounds that went on without a cluster, by cluster."""
        names = sorted({name for event in self.events for name in event.lost})
        return {n: [e.round_index for e in self.events if n in e.lost] for n in names}

    @property
    def never_trained(self) -> list[str]:
        """The clusters without which every round went on."""
        return [name for name, rounds in self.lost.items() if len(rounds) == len(self.events)]

    def expected_wall_s(self, event: RoundEvent) -> float | None:
        """Predict the seconds of a round without its evaluation, before it begins.

        The planned latency of the slowest cluster, plus the median of what server, messages and
        aggregation took in the last rounds. None where no machines are timed.
        """
        timed = [each["measured"] for each in event.clusters.values()]
        if event.predicted_latency_s is None or not timed or not all(timed):
            return None
        recent = [e for e in self.events[-_RECENT:] if e.latency_s is not None]
        besides = [e.wall_s - e.evaluation_s - (e.latency_s or 0.0) for e in recent]
        return event.predicted_latency_s + (median(besides) if besides else 0.0)

    def summary(self, *, status: str, wall_s: float, reason: str | None = None) -> dict[str, Any]:
        """Return the content of ``summary.json`` with the last plan (see `RunDirectory`)."""
        sums = self.sums
        total = {
            f.name: sum(getattr(e.bytes, f.name) for e in self.events) for f in fields(LinkBytes)
        }
        asked = [e for e in self.events if e.clusters_loss is not None]
        on_shares = (
            {"loss": asked[-1].clusters_loss, **asked[-1].clusters_metrics} if asked else None
        )
        joules = {**dict.fromkeys(self.energy_budget_j, 0.0), **sums.energy_j}
        mean_j = {device: j / max(len(self.events), 1) for device, j in joules.items()}
        scored = [e.metrics[self.metric_name] for e in self.events if e.metrics]
        summary = {
            "status": status,
            "reason": reason,
            "rounds": len(self.events),
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
            "clusters": on_shares,  # of the test set
            "loss": [e.loss for e in self.events],
            "wall_s": round(wall_s, 3),
            "predicted_latency_s": [e.predicted_latency_s for e in self.events],
            "latency_s": [e.latency_s for e in self.events],
            "prediction_error": median(sums.errors) if sums.errors else None,
            "energy": {"budget_j": dict(self.energy_budget_j), "mean_j": mean_j},
            "bytes": total,
            "links": [link_json(link) for link in sums.links],
            "peak_memory_bytes": dict(sums.memory_bytes),
            "memory_limit_bytes": dict(self.memory_limit_bytes),
            "model_share": sums.share_json(self.share_asked),
            "versions": dict(self.versions),
            "plans": [] if sums.plan is None else [sums.plan],
        }
        return dict(replace_nonfinite(summary))


def describe_share_cap(share: Mapping[str, float | None]) -> str:
    """Say `RunSums.share_json` in words: the cap, and why it is more than what was asked."""
    cap, asked = share["cap"], share.get("asked")
    if cap is None:
        return ""
    why = "" if asked is None or cap <= asked else f", as no plan keeps the {100 * asked:.3g} % set"
    return f" ({100 * cap:.3g} % allowed{why})"


def is_early(rounds: int, policy: str | None) -> bool:
    """Return whether the run is too short to judge budgets, which are long-term."""
    return rounds < KEPT_FROM and policy == _PAYING


def holders(segment: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the device of a segment of ``plan``, and its replicas, which older plans lack."""
    return (segment["device_id"], *segment.get("replicas", ()))


def control_unit_role(plan: Mapping[str, Any]) -> dict[str, str]:
    """Map the id of a cluster's control unit to ``CLUSTER/control-unit``, as people know it."""
    powers = set(plan.get("tx_power_w", ()))
    alone = powers - set(plan.get("gradient_power_w", powers))  # it sends no gradients
    return dict.fromkeys(alone, f"{plan['cluster_id']}/control-unit")


def cluster_json(plan: ClusterPlan | None, outcome: ClusterOutcome) -> dict[str, Any]:
    """Return the prediction of a cluster's round beside its outcome.

    ``measured`` is whether machines timed it, ``error`` is ln(predicted / real). Seconds of stages
    are of one micro-batch, forward and backward.
    """
    predicted_s = None if plan is None else plan.latency_s
    known = predicted_s is not None and predicted_s > 0 and outcome.latency_s > 0
    return {
        "predicted_s": predicted_s,
        "latency_s": outcome.latency_s,
        "measured": outcome.measured,
        "error": log(predicted_s / outcome.latency_s) if predicted_s and known else None,
        "loss": outcome.loss,
        "model_share": None if plan is None else plan.fullest_share,
        "model_share_cap": None if plan is None else plan.model_share,
        "stages": {
            sample.device_id or "edge": {
                "predicted_s": sample.expected_s,
                "measured_s": sample.busy_s,
                "planned_bytes": sample.planned_bytes or None,
                "peak_bytes": sample.peak_bytes,
            }
            for sample in outcome.stages
        },
        "energy": {
            name: {
                "predicted_j": None if plan is None else plan.energy_j.get(name, 0.0),
                "energy_j": joules,
                "source": "metered" if name in outcome.metered else "modelled",
            }
            for name, joules in outcome.energy_j.items()
        },
    }


def link_json(report: LinkReport) -> dict[str, Any]:
    """Return a hop with its measured and planned rates."""
    return {
        "cluster": report.cluster_id,
        "sender": report.sender,
        "receiver": report.receiver,
        "codec": report.link.codec,
        "forward": _way_json(report.forward, report.link.forward_bit_per_s),
        "backward": _way_json(report.backward, report.link.backward_bit_per_s),
    }


def link_of_json(data: Mapping[str, Any]) -> LinkReport:
    """Read what :func:`link_json` wrote."""
    forward, backward = data["forward"], data["backward"]
    return LinkReport(
        cluster_id=data["cluster"],
        sender=data["sender"],
        receiver=data["receiver"],
        link=LinkConfig(
            codec=data["codec"],
            forward_bit_per_s=forward["planned_bit_per_s"],
            backward_bit_per_s=backward["planned_bit_per_s"],
        ),
        forward=LinkTraffic(bytes=forward["bytes"], sending_s=forward["sending_s"]),
        backward=LinkTraffic(bytes=backward["bytes"], sending_s=backward["sending_s"]),
    )


def _way_json(traffic: LinkTraffic, planned_bit_per_s: float | None) -> dict[str, Any]:
    return {
        "bytes": traffic.bytes,
        "sending_s": traffic.busy_s,
        "bit_per_s": traffic.bit_per_s,
        "planned_bit_per_s": planned_bit_per_s,
    }


def replace_nonfinite(value: Any, digits: int | None = None) -> Any:
    """Replace every NaN or infinity in plain data by None; round other floats to ``digits``."""
    if isinstance(value, float):
        rounded = value if digits is None else float(f"{value:.{digits}g}")
        return rounded if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_nonfinite(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nonfinite(item, digits) for item in value]
    return value
