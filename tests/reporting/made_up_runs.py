"""Runs that never were, as large as wanted: what their directories hold."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from collapipe_flwr.core.domain import ClusterPlan, Plan, Segment
from collapipe_flwr.core.json_codec import to_plain
from collapipe_flwr.core.links import LinkConfig, LinkReport, LinkTraffic
from collapipe_flwr.core.outcome import ClusterOutcome, StageSample
from collapipe_flwr.reporting.events import RoundEvent, cluster_json, link_json
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import EVENTS, RunDirectory

_KINDS = ("raspberry-pi-5", "raspberry-pi-4", "jetson-nano", "phone")
_BLOCKS_EACH = 2
_DIFFERENT = 20  # rounds, in runs that are so long that they repeat themselves


class MadeUpRun:
    """A directory that grows round by round; the same numbers for the same seed."""

    def __init__(
        self,
        path: Path,
        *,
        clusters: int = 2,
        devices: int = 3,
        rounds_asked: int = 50,
        measured: bool = True,
        seed: int = 0,
        name: str = "cluster",
    ) -> None:
        self.directory = RunDirectory(path)
        self._chance = random.Random(seed)
        self._measured = measured
        self._members = {
            f"{name}-{c}": [f"{name}-{c}/{d}-{_KINDS[d % 4]}" for d in range(1, devices + 1)]
            for c in range(clusters)
        }
        device_ids = [name for members in self._members.values() for name in members]
        budgets = dict.fromkeys([f"{c}/cu" for c in self._members] + device_ids, 2.0)
        self._queues = dict.fromkeys(budgets, 0.0)
        self.events: list[RoundEvent] = []
        self.story = RunStory(
            metric_name="accuracy",
            initial={"accuracy": 0.01},
            energy_budget_j=budgets,
            memory_limit_bytes=dict.fromkeys(budgets, 12 * 10**7),
            rounds_asked=rounds_asked,
            versions={"collapipe-flwr": "0.1.0", "flwr": "1.41.0", "Python": "3.11.7"},
        )
        self._alive = ExitStack()
        config = {"num-server-rounds": rounds_asked, "clusters": clusters}
        self.directory.write_config(config, self._alive)
        self.save("running")

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    def die(self) -> None:
        """End as by SIGKILL: nobody writes the directory any more, and nobody says so."""
        self._alive.close()

    def save(self, status: str, reason: str | None = None) -> None:
        """Replace the summary."""
        wall_s = 3.0 * len(self.events)
        self.directory.write_summary(
            self.story.summary(status=status, wall_s=wall_s, reason=reason)
        )

    def end_round(self, **changes: Any) -> RoundEvent:
        """One round more, in the events and in the summary."""
        event = replace(self.event(len(self.events) + 1), **changes)
        self.events.append(event)
        self.story.add(event)
        self.directory.append_event(event.as_json())
        self.save("running")
        return event

    def begin_long(self, rounds: int) -> None:
        """Write many rounds at once, of which few differ in more than their number."""
        events = [self.event(index).as_json() for index in range(1, min(_DIFFERENT, rounds) + 1)]
        rests = [json.dumps(event).partition(",")[2] for event in events]
        with (self.path / EVENTS).open("w", encoding="utf-8") as file:
            for index in range(rounds):
                file.write(f'{{"round_index": {index + 1},{rests[index % len(rests)]}\n')

    def event(self, index: int) -> RoundEvent:
        """A round that all clusters take part in."""
        plans = [self._plan(name, members) for name, members in self._members.items()]
        outcomes = {plan.cluster_id: self._outcome(plan) for plan in plans}
        energy = {k: v for outcome in outcomes.values() for k, v in outcome.energy_j.items()}
        for name, spent in energy.items():
            budget = self.story.energy_budget_j[name]
            self._queues[name] += spent - budget  # below 0: saved
        latency_s = max(outcome.latency_s for outcome in outcomes.values())
        predicted_s = max(plan.latency_s for plan in plans)
        plan = Plan(
            round_index=index,
            policy="dssda",
            clusters=tuple(plans),
            latency_s=predicted_s,
            rho=1.0,
        )
        return RoundEvent(
            round_index=index,
            wall_s=latency_s + 0.5,
            evaluation_s=0.3,
            metrics={"loss": 4.0 / index, "accuracy": 1.0 - 1.0 / (index + 1)},
            loss=5.0 / index,
            plan=to_plain(plan),
            predicted_latency_s=predicted_s,
            latency_s=latency_s,
            clusters={p.cluster_id: cluster_json(p, outcomes[p.cluster_id]) for p in plans},
            energy_j=energy,
            queues_j=dict(self._queues),
            bytes={"d2d": 10**7, "d2e": 10**6, "flower": 10**8, "weights": 0, "spared": 0},
            links=tuple(link_json(link) for p in plans for link in self._links(p)),
            memory_bytes={
                name.replace("/cu", "/control-unit"): self._chance.randrange(10**7, 10**8)
                for name in energy
            },
        )

    def _plan(self, name: str, members: list[str]) -> ClusterPlan:
        order = self._chance.sample(members, len(members))
        cuts = range(0, _BLOCKS_EACH * len(members), _BLOCKS_EACH)
        segments = tuple(
            Segment(device_id=device, first_block=cut, stop_block=cut + _BLOCKS_EACH)
            for device, cut in zip(order, cuts, strict=True)
        )
        hops = tuple(
            LinkConfig(forward_bit_per_s=rate, backward_bit_per_s=rate * 1.1)
            for rate in (self._rate() for _ in range(len(members) + 1))
        )
        latency_s = self._chance.uniform(2.0, 3.0)
        return ClusterPlan(
            cluster_id=name,
            segments=segments,
            micro_batch_size=16,
            micro_batches=8,
            warmup_depth=(2,) * (len(members) + 2),
            local_steps=4,
            bandwidth_hz=2e7,
            tx_power_w=dict.fromkeys([f"{name}/cu", *order], 0.1),
            gradient_power_w=dict.fromkeys(order, 0.1),
            latency_s=latency_s,
            step_s=latency_s / 4,
            energy_j=dict.fromkeys([f"{name}/cu", *order], 2.0),
            memory_bytes=dict.fromkeys(order, 10**8),
            hops=hops,
        )

    def _outcome(self, plan: ClusterPlan) -> ClusterOutcome:
        stages = tuple(
            StageSample(
                device_id=name,
                passes=4.0,
                flop=1e9,
                busy_s=self._chance.uniform(0.01, 0.08),
                expected_s=0.04,
                planned_bytes=10**8,
                peak_bytes=9 * 10**7,
            )
            for name in (*plan.member_ids, "")
        )
        return ClusterOutcome(
            cluster_id=plan.cluster_id,
            latency_s=plan.latency_s * self._chance.uniform(0.9, 1.2),
            energy_j={name: self._chance.uniform(0.5, 3.6) for name in plan.tx_power_w},
            loss=plan.latency_s,
            stages=stages,
            measured=self._measured,
            metered=plan.device_ids[:1],
        )

    def _links(self, plan: ClusterPlan) -> Iterator[LinkReport]:
        ends = ("control-unit", *plan.device_ids, "edge")
        for sender, receiver, link in zip(ends, ends[1:], plan.hops, strict=False):
            seconds = 8e6 / self._rate() if self._measured else 0.0
            traffic = LinkTraffic(bytes=10**6, sending_s=seconds)
            yield LinkReport(
                cluster_id=plan.cluster_id,
                sender=sender,
                receiver=receiver,
                link=link,
                forward=traffic,
                backward=traffic,
            )

    def _rate(self) -> float:
        return self._chance.uniform(2e7, 9e7)
