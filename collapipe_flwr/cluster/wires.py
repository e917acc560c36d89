"""The links of a chain whose devices are threads of this process."""

from __future__ import annotations

from collections.abc import Sequence

from collapipe_flwr.core.domain import ClusterPlan
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.turns import Turn
from collapipe_flwr.pipeline.fan import fan_of
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.siblings import Siblings
from collapipe_flwr.transport.simulated_link import simulated_pair

CONTROL_UNIT = "control-unit"


class Wires:
    """All links of a chain in memory; a pair is made when its first end is asked for."""

    def __init__(
        self, plan: ClusterPlan, hops: Sequence[LinkConfig], edges: Sequence[Link]
    ) -> None:
        self._segments, self._replicas = plan.segments, plan.replicas
        self._hops, self._edges = hops, edges
        self._between: dict[tuple[int, int, int], tuple[Link, Link]] = {}  # hop, sender, receiver
        self._siblings: dict[tuple[int, int], tuple[Link, Link]] = {}  # stage, the one ahead

    def down(self, stage: int, turn: Turn) -> Link:
        """To the replicas behind that its micro-batches meet; the last hop is the edge's."""
        if stage == len(self._replicas) - 2:
            return self._edges[turn.replica]
        met = turn.meets(self._replicas[stage + 1])
        return fan_of([self._pair(stage, turn.replica, other)[0] for other in met], turn)

    def up(self, stage: int, turn: Turn) -> Link:
        """To the replicas ahead."""
        met = turn.meets(self._replicas[stage - 1])
        return fan_of([self._pair(stage - 1, other, turn.replica)[1] for other in met], turn)

    def beside(self, stage: int, turn: Turn) -> Siblings:
        """To the replicas next to it in the line."""
        replica = turn.replica
        is_last = replica == turn.replicas - 1
        return Siblings(
            ahead=self._line(stage, replica - 1)[1] if replica else None,
            behind=None if is_last else self._line(stage, replica)[0],
            place=replica,
        )

    def _pair(self, hop: int, sender: int, receiver: int) -> tuple[Link, Link]:
        if (place := (hop, sender, receiver)) not in self._between:
            names = self._name(hop, sender), self._name(hop + 1, receiver)
            self._between[place] = simulated_pair(*names, self._hops[hop])
        return self._between[place]

    def _line(self, stage: int, ahead: int) -> tuple[Link, Link]:
        if (place := (stage, ahead)) not in self._siblings:
            names = self._name(stage, ahead), self._name(stage, ahead + 1)
            self._siblings[place] = simulated_pair(*names, LinkConfig(lanes=0))
        return self._siblings[place]

    def _name(self, stage: int, replica: int) -> str:
        return self._segments[stage - 1].device_ids[replica] if stage else CONTROL_UNIT
