"""What a page shows of a run, kept up round by round, and what a page lacks of it.

A page that knows the state up to a :class:`Place` is sent the rounds behind it, the newest picture
of the clusters, and the head. One that knows another file, or nothing, is sent everything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from collapipe_flwr.reporting.live.picture import round_picture

Json = dict[str, Any]
_MOST_INCIDENTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far somebody knows a run; ``file`` names the events that were read, ``head`` counts."""

    file: str = ""
    rounds: int = 0
    incidents: int = 0
    picture: int = 0
    head: int = 0

    def __str__(self) -> str:
        return f"{self.file}/{self.rounds}/{self.incidents}/{self.picture}"

    @staticmethod
    def of_text(text: str) -> Place:
        """What ``str`` made of a place; that of somebody who knows nothing for any other text."""
        file, *numbers = text.split("/")
        if len(numbers) != 3 or not all(n.isascii() and n.isdigit() for n in numbers):
            return Place()
        rounds, incidents, picture = (int(n[:9]) for n in numbers)
        return Place(file=file, rounds=rounds, incidents=incidents, picture=picture)


class RunState:
    """The state of one run; not safe by itself between threads."""

    def __init__(self) -> None:
        self.head: Json = {"status": "waiting"}
        self._budget_j: Mapping[str, float | None] = {}
        self.place = Place(head=1)
        self.begin("")

    def begin(self, file: str) -> None:
        """Forget the rounds: they are read from a file that took the place of the last."""
        self._rows: list[Json] = []
        self._incidents: list[Json] = []
        self._clusters: dict[str, Json] = {}
        self.place = Place(file=file, head=self.place.head)

    def set_head(self, head: Json, budget_j: Mapping[str, float | None]) -> None:
        """What is not of a round: status, name, settings; joules per round, by device."""
        self._budget_j = budget_j
        if head != self.head:
            self.head = head
            self.place = replace(self.place, head=self.place.head + 1)

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Rounds that ended, oldest first."""
        newest = None
        for newest in events:
            self._rows.append(_row(newest, self._budget_j))
            for text in newest.get("failures", ()):
                self._incidents.append({"round": newest["round_index"], "text": text})
        if newest is not None:
            self.place = replace(self.place, rounds=len(self._rows), incidents=len(self._incidents))
            self.show(newest)

    def show(self, event: Mapping[str, Any]) -> None:
        """Draw the clusters as of this round, unless a later one is drawn already."""
        if event["round_index"] < self.place.picture:
            return
        pictures = round_picture(event, self._budget_j)
        self._clusters |= {p["id"]: {**p, "round": event["round_index"]} for p in pictures}
        self.place = replace(self.place, picture=event["round_index"])

    def since(self, known: Place) -> Json:
        """What somebody lacks; ``anew`` tells to forget what was known."""
        anew = known.file != self.place.file or known.rounds > self.place.rounds
        known = Place() if anew else known
        fresh = anew or known.picture != self.place.picture
        told = self._incidents[known.incidents :][-_MOST_INCIDENTS:]
        return {
            "anew": anew,
            "head": self.head,
            "sent_s": time.time(),
            "last": self._rows[-1] if self._rows else None,
            "incidents": told,
            "round": self.place.picture,
            "clusters": list(self._clusters.values()) if fresh else None,
        }


def _row(event: Mapping[str, Any], budget_j: Mapping[str, float | None]) -> Json:
    """One round in numbers; ``queue`` is the longest energy queue, in budgets of a round."""
    queues = (
        queue_j / budget
        for device, queue_j in event.get("queues_j", {}).items()
        if (budget := budget_j.get(device))
    )
    return {
        "round": event["round_index"],
        "queue": max(queues, default=None),
        "lost": len(event.get("lost", ())),
        "failures": len(event.get("failures", ())),
        "predicted_s": event.get("predicted_latency_s"),
        **{key: event.get(key) for key in _KEYS},
    }


_KEYS = (
    *("wall_s", "evaluation_s", "loss", "metrics", "clusters_loss", "clusters_metrics"),
    *("latency_s", "bytes", "fresh_examples", "prequential_loss"),
)
