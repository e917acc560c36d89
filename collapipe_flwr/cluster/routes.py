"""Which session every device of a chain sends to, and what opens the device's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from collapipe_flwr.cluster.order import RoundOrder, StageReplica
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.schedule import ALONE, ReplicaIndex
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.config import NextHop, Placement, SessionRequest


@dataclass(frozen=True, slots=True)
class Routes:
    """The connections of a chain; `places` are sessions by device, `links` those of the hops."""

    order: RoundOrder
    places: Mapping[str, NextHop]
    edge: NextHop
    links: Sequence[LinkConfig]

    def down(self, holder: StageReplica) -> tuple[NextHop, ...]:
        """Return the next stage's sessions, in the order of the holder's micro-batches."""
        link = self.links[holder.stage]
        if holder.stage == len(self.order.plan.segments):
            return (_set_lane(self.edge, link, holder, ALONE),)
        names = self.order.plan.segments[holder.stage].device_ids
        return tuple(
            _set_lane(
                self.places[names[other]],
                link,
                holder,
                ReplicaIndex(replica=other, replicas=len(names)),
            )
            for other in holder.turn.meets(len(names))
        )

    def ahead(self, holder: StageReplica) -> NextHop | None:
        """Return the session of the replica before this one; the first has none."""
        if holder.turn.replica == 0:
            return None
        name = holder.segment.device_ids[holder.turn.replica - 1]
        return replace(self.places[name], link=LinkConfig(lanes=0))

    def request(self, splitter: AnySplitter, holder: StageReplica) -> SessionRequest:
        """Build the request that opens the session of one device."""
        order, segment = self.order, holder.segment
        return SessionRequest(
            key=self.places[holder.device_id].key,
            spec_json=splitter.spec.to_json(),
            stage=order.settings(holder.stage, holder.turn),
            placement=Placement(
                blocks=(segment.first_block, segment.stop_block),
                next_hops=self.down(holder),
                tx_power_w=order.plan.tx_power_w.get(holder.device_id),
                sibling=self.ahead(holder),
            ),
            optimizer=order.learning.optimizer,
            keep_optimizer=order.keep_optimizer,
            run_id=order.learning.run_id,
            server_round=order.server_round,
        )


def _set_lane(
    place: NextHop, link: LinkConfig, holder: StageReplica, receiver: ReplicaIndex
) -> NextHop:
    """Give the holder's link its place among those that the receiver reads in turn."""
    senders = receiver.meets(holder.turn.replicas)
    lane = senders.index(holder.turn.replica)
    return replace(place, link=replace(link, lane=lane, lanes=len(senders)))
