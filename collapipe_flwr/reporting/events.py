"""The report of a round, as values.

Keys of per-device mappings read ``cluster/device``; ``memory_bytes`` also has
``cluster/control-unit`` and ``cluster/edge`` (the cluster's decoder replica).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite, log, nan
from typing import Any

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.incident import QUARANTINED, Incident
from collapipe_flwr.core.links import LinkReport, LinkTraffic
from collapipe_flwr.core.outcome import ClusterOutcome

KEPT_FROM = 10  # rounds: from then on, energy budgets hold
_PAYING = "dssda"  # the policy that pays back what is above them
KINDS = {  # of bytes that crossed a class of link in a round, headers included
    "d2d": "between devices",  # and the control unit
    "d2e": "devices and edge",
    "flower": "server and control units",  # arrays and records
    "weights": "segments to devices",  # that are machines of their own
    "spared": "spared: was there already",  # of those
}


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
    bytes: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    links: tuple[Mapping[str, Any], ...] = ()  # see `link_json`
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    lost: tuple[str, ...] = ()  # clusters that were away or whose round came to nothing
    fresh_examples: int = 0  # new ones of data.stream
    prequential_loss: float | None = None  # on them, before training on them
    epsilon: Mapping[str, float] = field(default_factory=dict)  # spent so far, by cluster
    spared: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # `Spared` by cluster
    adapter_error: float | None = None  # of products of adapters, cut to the global rank

    @property
    def failures(self) -> tuple[Incident, ...]:
        """The incidents that cost the round something."""
        return tuple(each for each in self.incidents if each.kind != QUARANTINED)

    def as_json(self) -> dict[str, Any]:
        """Return plain data for the event log; JSON knows no NaN, so a diverged number is null."""
        failures = list(map(str, self.failures))
        return dict(replace_nonfinite({**asdict(self), "failures": failures}))

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
        values["links"] = tuple(data.get("links", ()))
        return RoundEvent(**values)


def describe_share_cap(share: Mapping[str, float | None]) -> str:
    """Say `RunData.share_json` in words: the cap, and why it is more than what was asked."""
    cap, asked = share["cap"], share.get("asked")
    if cap is None:
        return ""
    why = "" if asked is None or cap <= asked else f", as no plan keeps the {100 * asked:.3g} % set"
    return f" ({100 * cap:.3g} % allowed{why})"


def describe_spared(spared: Mapping[str, float]) -> str:
    """Say a sum of `Spared` in words."""
    share = 100 * spared["hits"] / spared["visits"]
    seconds, joules = spared["seconds"], spared["joules"]
    return f"kept for {share:.0f} % of visits, which spared {seconds:.3g} s and {joules:.3g} J"


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
