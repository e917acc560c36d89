"""What a page shows of a run, kept up round by round, and what a page lacks of it.

A page that knows the state up to a :class:`Place` is sent what came since. One that knows rounds of
another file, or nothing, is sent everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from collapipe_flwr.reporting.live.picture import round_picture
from collapipe_flwr.reporting.report.run_data import Incident, incidents_of

Json = dict[str, Any]
_MOST_INCIDENTS = 50  # that are sent at once: the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far somebody knows a run.

    ``file`` names the events that were read and ``rounds`` counts them; ``picture`` is the round
    that the clusters are drawn of. ``head`` counts changes of the rest.
    """

    file: str = ""
    rounds: int = 0
    picture: int = 0
    head: int = 0

    def __str__(self) -> str:
        return f"{self.file}/{self.rounds}/{self.picture}"

    @staticmethod
    def of_text(text: str) -> Place:
        """What ``str`` made of a place; that of somebody who knows nothing for any other text."""
        file, *numbers = text.split("/")
        if len(numbers) != 2 or not all(n.isascii() and n.isdigit() for n in numbers):
            return Place()
        rounds, picture = (int(n[:9]) for n in numbers)
        return Place(file=file, rounds=rounds, picture=picture)


class RunState:
    """The state of one run; not safe by itself between threads."""

    def __init__(self) -> None:
        self.place = Place(head=1)
        self._head: Json = {"status": "waiting"}
        self._budget_j: Mapping[str, float | None] = {}
        self.begin("")

    def begin(self, file: str) -> None:
        """Forget the rounds: they are read anew from a file that took the place of the last."""
        self._incidents: list[Incident] = []
        self._told: list[int] = []  # incidents up to each round
        self._clusters: dict[str, Json] = {}
        self._last: Json | None = None
        self.place = Place(file=file, head=self.place.head)

    def set_head(self, head: Json, budget_j: Mapping[str, float | None]) -> None:
        """What is not of a round: status, name, settings; joules per round, by device."""
        self._budget_j = budget_j
        if head != self._head:
            self._head = head
            self.place = replace(self.place, head=self.place.head + 1)

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Rounds that ended, oldest first."""
        newest = None
        for newest in events:
            self._incidents += incidents_of(newest)
            self._told.append(len(self._incidents))
        if newest is not None:
            self.place = replace(self.place, rounds=len(self._told))
            self.show(newest)

    def show(self, event: Mapping[str, Any]) -> None:
        """Draw a round, unless a later one is drawn already."""
        if event["round_index"] <= self.place.picture:
            return
        self._last = _numbers(event, self._budget_j)
        for picture in round_picture(event, self._budget_j):
            name, before = picture["id"], self._clusters.get(picture["id"])
            if before is not None and not picture["stages"]:  # as it was last seen
                self._clusters[name] = {**before, "lost": picture["lost"]}
            else:
                self._clusters[name] = {**picture, "round": event["round_index"]}
        self.place = replace(self.place, picture=event["round_index"])

    def since(self, known: Place) -> Json:
        """What somebody lacks; ``anew`` tells to forget what was known."""
        anew = known.file != self.place.file or known.rounds > self.place.rounds
        known = Place() if anew else known
        fresh = known.picture != self.place.picture
        told = self._told[known.rounds - 1] if known.rounds else 0
        incidents = self._incidents[max(told, len(self._incidents) - _MOST_INCIDENTS) :]
        return {
            "anew": anew,
            "sent_s": time.time(),
            "head": self._head,
            "rounds": self.place.rounds,
            "last": self._last,
            "incidents": [
                {"round": i.round_index, "cluster": i.cluster, "text": i.text} for i in incidents
            ],
            "clusters": list(self._clusters.values()) if fresh else None,
        }


def _numbers(event: Mapping[str, Any], budget_j: Mapping[str, float | None]) -> Json:
    """A round as a whole; ``queue`` is the longest energy queue, in budgets of a round."""
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
