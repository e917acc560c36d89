"""The seam between a control unit and its devices: threads here, daemons on boards there.

A fleet turns a planned round into a chain of stages that is joined to the edge and waits for the
first step. Who runs the chain sees one link, and at its end the trained segments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from collapipe_flwr.cluster.order import RoundOrder
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.state import PartState
from collapipe_flwr.transport.weights import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """What the devices give back; ``reports`` stand in pipeline order."""

    state: PartState
    reports: tuple[StageReport, ...]
    moved: TransferStats = field(default_factory=TransferStats)  # to place and to collect them


class Chain(Protocol):
    """Device 1 -> ... -> device K -> edge, ready for steps."""

    @property
    def link(self) -> Link:
        """The control unit's link to device 1."""
        ...

    def collect(self, *, keep_optimizer: Callable[[], bool] = lambda: False) -> Segments:
        """The segments, after the END frame went down ``link``; optimiser slots where asked for.

        Waits for every device and the edge to end; raises the LinkError of one that failed or
        went on.
        """
        ...


class Fleet(Protocol):
    """The devices of one cluster."""

    def chain(self, splitter: Splitter, order: RoundOrder) -> AbstractContextManager[Chain]:
        """Place the segments of ``order`` and join them; nothing of it is left afterwards.

        Raises LinkError when a device or the edge cannot be reached or refuses. ``order`` is
        never changed, so a round that fails can be tried again.
        """
        ...

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """Those that do not answer now; asks all of them at once, for a second or two."""
        ...
