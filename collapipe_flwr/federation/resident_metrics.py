"""What a control unit tells a Prometheus server, and its logs, of the messages that it answers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from flwr.app import Message

from collapipe_flwr.core.errors import CollaPipeError

_OURS = "collapipe."  # how the keys of our records begin
ANSWERED, RAISED, ABANDONED = "answered", "raised", "abandoned"


class ResidentMetrics:
    """A prometheus_client collector; written by one thread, read by any."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter({ANSWERED: 0, RAISED: 0, ABANDONED: 0})
        self._busy, self._spent_s, self._round = False, 0.0, 0

    @contextmanager
    def working(self, about: Mapping[str, Any]) -> Iterator[None]:
        """Count the body as time spent on a message."""
        began_s = time.monotonic()
        self._busy, self._round = True, int(about.get("round", self._round))
        try:
            yield
        finally:
            self._busy = False
            self._spent_s += time.monotonic() - began_s

    def ended(self, how: str) -> None:
        self._ended[how] += 1

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        name = "collapipe_control_unit"
        yield GaugeMetricFamily(f"{name}_busy", "Whether a message is worked on.", self._busy)
        yield GaugeMetricFamily(f"{name}_round", "Newest round that was asked for.", self._round)
        yield CounterMetricFamily(f"{name}_seconds", "Seconds of work on messages.", self._spent_s)
        ended = CounterMetricFamily(f"{name}_messages", "Messages that ended.", labels=("how",))
        for how, count in self._ended.items():
            ended.add_metric((how,), count)
        yield ended


def message_about(message: Message) -> dict[str, Any]:
    """Run, round and cluster of an order; of other messages, the type alone."""
    about: dict[str, Any] = {"type": message.metadata.message_type}
    configs = message.content.config_records.values() if message.has_content() else ()
    if not any(key.startswith(_OURS) for config in configs for key in config):
        return about
    from collapipe_flwr.federation.records import read_assignment, round_and_run  # loads torch

    with suppress(CollaPipeError):  # the app says what is wrong with it
        about["round"], about["run"] = round_and_run(message.content)
        about["cluster"] = read_assignment(message.content).cluster_id
    return about
