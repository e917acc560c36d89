"""Whom every device of a chain dials, where each is a host of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from collapipe_flwr.cluster.fleet import Holder, RoundOrder
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.turns import ALONE, Turn
from collapipe_flwr.pipeline.config import NextHop


@dataclass(frozen=True, slots=True)
class Routes:
    """`places` are the sessions by device, `links` those of the hops, the edge's last."""

    order: RoundOrder
    places: Mapping[str, NextHop]
    edge: NextHop
    links: Sequence[LinkConfig]

    def down(self, holder: Holder) -> list[NextHop]:
        """The next stage's sessions, in the order in which the holder's micro-batches take them."""
        link = self.links[holder.stage]
        if holder.stage == len(self.order.plan.segments):
            return [_lane(self.edge, link, holder, ALONE)]
        names = self.order.plan.segments[holder.stage].device_ids
        return [
            _lane(self.places[names[other]], link, holder, Turn(replica=other, replicas=len(names)))
            for other in holder.turn.meets(len(names))
        ]

    def ahead(self, holder: Holder) -> NextHop | None:
        """The session of the replica before this one; the first has none."""
        if holder.turn.replica == 0:
            return None
        name = holder.segment.device_ids[holder.turn.replica - 1]
        return replace(self.places[name], link=LinkConfig(lanes=0))


def _lane(place: NextHop, link: LinkConfig, holder: Holder, receiver: Turn) -> NextHop:
    lane, lanes = holder.lane_to(receiver)
    return replace(place, link=replace(link, lane=lane, lanes=lanes))
