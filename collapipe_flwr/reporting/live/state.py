"""The state of a run as a page shows it, updated round by round.

A page is sent the clusters and the newest incidents whenever rounds have ended, and the rest when
it changes. A cluster is drawn as a chain of stages and the hops between them: plain data, small
enough to send for a thousand devices after every round.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from collapipe_flwr.reporting.events import holders, replace_nonfinite
from collapipe_flwr.reporting.run_data import incidents_of

_MOST_INCIDENTS = 50  # that a page shows: the newest
Json = dict[str, Any]
Event = Mapping[str, Any]  # or a part of one
CONTROL_UNIT, EDGE = "control-unit", "edge"
_DIGITS = 4  # more than a page shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How much of a run a page knows: counts of changes of the rounds, and of the rest."""

    rounds: int = 0
    head: int = 0


class RunState:
    """The state of one run; not thread-safe."""

    def __init__(self) -> None:
        self.place = Place(head=1)
        self._head: Json = {"status": "waiting"}
        self._budget_j: Mapping[str, float | None] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the rounds: they are read again from a file that replaced the last one."""
        self._rounds = self._drawn = 0  # that were read, and the index of the one that is drawn
        self._incidents: deque[Json] = deque(maxlen=_MOST_INCIDENTS)
        self._clusters: dict[str, Json] = {}
        self._last: Json | None = None
        self._change_rounds()

    def set_head(self, head: Json, budget_j: Mapping[str, float | None]) -> None:
        """Set status, name and settings, and the budgets by device in joules per round."""
        self._budget_j = budget_j
        if head != self._head:
            self._head = head
            self.place = replace(self.place, head=self.place.head + 1)

    def add(self, events: Sequence[Event]) -> None:
        """Add rounds, oldest first."""
        for event in events:
            self._incidents += incidents_of(event)
        self._rounds += len(events)
        if events:
            self._change_rounds()
            self.show(events[-1])

    def show(self, event: Event) -> None:
        """Draw a round, unless a later one is drawn already."""
        if event["round_index"] <= self._drawn:
            return
        self._drawn = event["round_index"]
        self._last = _numbers(event, self._budget_j)
        for picture in round_picture(event, self._budget_j):
            name, before = picture["id"], self._clusters.get(picture["id"])
            if before is not None and not picture["stages"]:  # as it was last seen
                self._clusters[name] = {**before, "lost": picture["lost"]}
            else:
                self._clusters[name] = {**picture, "round": event["round_index"]}
        self._change_rounds()

    def since(self, known: Place) -> Json:
        """Return what a page at ``known`` lacks."""
        told = {
            "sent_s": time.time(),
            "head": self._head,
            "rounds": self._rounds,
            "last": self._last,
        }
        if known.rounds != self.place.rounds:
            clusters, incidents = list(self._clusters.values()), list(self._incidents)
            told |= {"clusters": clusters, "incidents": incidents}
        return told

    def _change_rounds(self) -> None:
        self.place = replace(self.place, rounds=self.place.rounds + 1)


def _numbers(event: Event, budget_j: Mapping[str, float | None]) -> Json:
    """Summarise a round; ``queue`` is the longest energy queue, in budgets of a round."""
    queues = (
        max(0.0, queue_j / budget)
        for device, queue_j in event.get("queues_j", {}).items()
        if (budget := budget_j.get(device))
    )
    return {
        "round": event["round_index"],
        "queue": max(queues, default=None),
        "predicted_s": event.get("predicted_latency_s"),
        **{key: event.get(key) for key in ("wall_s", "loss", "metrics", "latency_s", "bytes")},
    }


def round_picture(event: Event, budget_j: Mapping[str, float | None]) -> list[Json]:
    """Draw all clusters of a round of ``events.jsonl``; ``budget_j`` is by device."""
    plans = {plan["cluster_id"]: plan for plan in (event.get("plan") or {}).get("clusters", ())}
    outcomes, lost = event.get("clusters", {}), event.get("lost", ())
    links: defaultdict[str, list[Event]] = defaultdict(list)
    for link in event.get("links", ()):
        links[link["cluster"]].append(link)
    queues: defaultdict[str, Json] = defaultdict(dict)
    for device, queue_j in event.get("queues_j", {}).items():
        queues[device.rpartition("/")[0]][device] = queue_j
    pictures = []
    for name in sorted({*plans, *outcomes, *lost}):
        plan, outcome = plans.get(name), outcomes.get(name) or {}
        memory = event.get("memory_bytes", {})
        head = (plan or {}).get("edge") or EDGE
        members = _members(name, head, outcome, queues[name], budget_j, memory)
        latency_s = outcome.get("latency_s")
        picture: Json = {
            "id": name,
            "lost": name in lost,
            "latency_s": latency_s,
            "predicted_s": outcome.get("predicted_s", plan and plan["latency_s"]),
            "measured": outcome.get("measured", False),
            "stages": [],
            "hops": [],
            "idle": list(members.values()),
        }
        if plan is not None:
            picture |= _pipeline(name, plan, members, links[name], latency_s)
        pictures.append(replace_nonfinite(picture, _DIGITS))
    return pictures


def _pipeline(
    cluster: str,
    plan: Event,
    members: Mapping[str, Json],
    links: Iterable[Event],
    latency_s: float | None,
) -> Json:
    """Return the stages of a plan, and the hops between them."""
    passes = plan["local_steps"] * plan["micro_batches"]
    stages = _stages(cluster, plan, members)
    busy = [name for stage in stages for name in stage["ids"]]
    return {
        "micro_batch_size": plan["micro_batch_size"],
        "micro_batches": plan["micro_batches"],
        "local_steps": plan["local_steps"],
        "per_s": passes / latency_s if latency_s else None,
        "stages": [_with_shares(stage, passes, latency_s) for stage in stages],
        "hops": _hops(stages, plan.get("hops", ()), links),
        "idle": [member for device, member in members.items() if device not in busy],
    }


def _members(
    cluster: str,
    head: str,
    outcome: Event,
    queues: Mapping[str, float],
    budget_j: Mapping[str, float | None],
    memory: Mapping[str, int],
) -> dict[str, Json]:
    """Return a round's measurements by device id, with those of control unit and edge.

    ``head`` is the edge's id, where there are several.
    """
    stages, energy = outcome.get("stages", {}), outcome.get("energy", {})
    names = [device for device in {**queues, **energy, **stages} if device != head]
    found = {device: stages.get(device, {}) for device in (*names, head)}
    roles = {head: f"{cluster}/{EDGE}"}  # the edge keeps a replica for each cluster
    called = {head: EDGE if head == EDGE else f"{EDGE} {head}"}
    return {
        device: {
            "name": called.get(device, device.removeprefix(f"{cluster}/")),
            "busy_s": stage.get("measured_s"),
            "expected_s": stage.get("predicted_s"),
            "peak_bytes": memory.get(roles.get(device, device), stage.get("peak_bytes")),
            "planned_bytes": stage.get("planned_bytes"),
            "energy_j": energy.get(device, {}).get("energy_j"),
            "metered": energy.get(device, {}).get("source") == "metered",
            "queue_j": queues.get(device),
            "budget_j": budget_j.get(device),
        }
        for device, stage in found.items()
    }


def _stages(cluster: str, plan: Event, members: Mapping[str, Json]) -> list[Json]:
    """List control unit, segments and edge in pipeline order; ``ids`` hold a stage."""
    held = [(holders(s), (s["first_block"], s["stop_block"])) for s in plan["segments"]]
    busy = {device for devices, _ in held for device in devices}
    control_unit = next((d for d in plan["tx_power_w"] if d not in busy), CONTROL_UNIT)
    rows = [((control_unit,), None), *held, ((plan.get("edge") or EDGE,), None)]
    stages: list[Json] = [
        {
            "ids": list(ids),
            "blocks": blocks,
            "devices": [members.get(d, {"name": d.removeprefix(f"{cluster}/")}) for d in ids],
        }
        for ids, blocks in rows
    ]
    stages[0]["devices"] = [{**device, "name": CONTROL_UNIT} for device in stages[0]["devices"]]
    return stages


def _with_shares(stage: Json, passes: int, latency_s: float | None) -> Json:
    """Add the share of the round that each device was computing; replicas alternate."""
    turns = passes / len(stage["devices"])
    devices = [
        {**device, "share": busy_s * turns / latency_s}
        if latency_s and (busy_s := device.get("busy_s")) is not None
        else device
        for device in stage["devices"]
    ]
    return {"blocks": stage["blocks"], "devices": devices}


def _hops(stages: list[Json], planned: Iterable[Event], links: Iterable[Event]) -> list[Json]:
    """Return the hop from each stage to the next; between replicas it has several links."""
    place = {name: index for index, stage in enumerate(stages) for name in stage["ids"]}
    place |= {CONTROL_UNIT: 0, EDGE: len(stages) - 1}
    carried: list[list[Event]] = [[] for _ in stages[1:]]
    for link in links:
        sender, receiver = place.get(link["sender"]), place.get(link["receiver"])
        if sender is not None and receiver == sender + 1:
            carried[sender].append(link)
    plans = [*planned, *({} for _ in carried)]
    return [_hop(plan, found) for plan, found in zip(plans, carried, strict=False)]


def _hop(plan: Event, links: list[Event]) -> Json:
    """Return a hop with planned rates and those of its slowest link; None: unknown."""
    hop = {
        "codec": plan.get("codec") or (links[0]["codec"] if links else None),
        "bytes": sum(link[way]["bytes"] for link in links for way in ("forward", "backward")),
    }
    for way in ("forward", "backward"):
        rates = [rate for link in links if (rate := link[way]["bit_per_s"]) is not None]
        planned = plan.get(f"{way}_bit_per_s")
        hop[way] = {"bit_per_s": min(rates, default=None), "planned": planned}
    return hop
