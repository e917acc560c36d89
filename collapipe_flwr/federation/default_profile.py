"""Plans for clients that describe nothing: a default profile for each, as advice.

An unmodified ClientApp trains the whole model in its own process, so the plan is one block (the
whole model) on one machine of a stated class. Its ``fallback`` says that it rests on assumptions;
no client is left out because of it, and nothing is priced after the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord

from collapipe_flwr.core.domain import BlockCost, ModelProfile
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.federation.checkpoint import Memory
from collapipe_flwr.federation.planner import ScheduledRounds
from collapipe_flwr.federation.records import array_bytes
from collapipe_flwr.federation.rounds import ClosedRound, Outcome, RoundPlan
from collapipe_flwr.scheduler.protocol import Scheduler
from collapipe_flwr.simulation.world import World, make_world

ASSUMED_DEVICE = "raspberry-pi-5"
ASSUMED_EXAMPLES = 1000
_ASSUMPTION = (
    f"the clients describe no devices: one {ASSUMED_DEVICE} with {ASSUMED_EXAMPLES} examples "
    "assumed for each"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    nodes: tuple[int, ...]
    state: str


class DefaultProfilePlanner:
    """A :class:`RoundPlanner` that knows only the nodes and the size of the model."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._nodes: list[int] = []
        self._rounds: ScheduledRounds | None = None
        self._loaded = Memory()

    def plan(self, server_round: int, nodes: Sequence[int], arrays: ArrayRecord) -> RoundPlan:
        """A plan that is advice; raises ScheduleError where the scheduler finds none."""
        names = {node: f"node-{node}" for node in nodes}
        if not nodes:
            return RoundPlan(server_round=server_round, plan=None, cluster_ids=names, binding=False)
        planned = self._rounds_for(nodes, arrays).plan(server_round, nodes, arrays)
        assert planned.plan is not None
        advice = replace(planned.plan, fallback=_ASSUMPTION)
        return replace(planned, plan=advice, binding=False)

    def settle(self, closed: ClosedRound) -> Outcome:
        """Nothing was measured, so nothing is priced."""
        del closed
        return Outcome()

    def dump(self) -> Memory:
        memory = self._rounds.dump() if self._rounds else self._loaded
        kept = _Kept(nodes=tuple(self._nodes), state=memory.text)
        return replace(memory, text=to_json(kept))

    def load(self, memory: Memory) -> None:
        """Restore from a checkpoint; raises ProtocolError for another planner's."""
        kept = from_json(_Kept, memory.text, "the planner's checkpoint")
        self._nodes = list(kept.nodes)
        self._rounds, self._loaded = None, replace(memory, text=kept.state)

    def _rounds_for(self, nodes: Sequence[int], arrays: ArrayRecord) -> ScheduledRounds:
        new = sorted(set(nodes) - set(self._nodes))
        if self._rounds is None or new:
            self._nodes += new
            names = {node: f"node-{node}" for node in self._nodes}
            model = assumed_model(arrays)
            world = assumed_world(list(names.values()), model)
            known = self._rounds.dump() if self._rounds else self._loaded
            self._rounds = ScheduledRounds(self._scheduler, world, model, names)
            self._rounds.load(known)
        return self._rounds


def assumed_model(arrays: ArrayRecord) -> ModelProfile:
    """One block that holds every array; 2 FLOP per parameter and example forward, 4 backward."""
    size = max(array_bytes(arrays), 1)
    flop = 2.0 * size / 4  # as if every parameter took 4 bytes
    nothing = BlockCost(
        forward_flop=0.0,
        backward_flop=0.0,
        parameter_bytes=0,
        state_bytes=0,
        stash_bytes=0.0,
        output_bytes=1.0,  # one byte crosses to the edge, none is too few for a radio model
    )
    whole = replace(
        nothing,
        forward_flop=flop,
        backward_flop=2 * flop,
        parameter_bytes=size,
        state_bytes=4 * size,  # weights, gradients, two moments
    )
    return ModelProfile(embedding=nothing, blocks=(whole,), decoder=nothing)


def assumed_world(cluster_ids: Sequence[str], model: ModelProfile) -> World:
    """One machine per cluster, with enough memory for the model."""
    count = len(cluster_ids)
    world = make_world(
        cluster_devices=[[ASSUMED_DEVICE, ASSUMED_DEVICE]] * count,
        examples=[ASSUMED_EXAMPLES] * count,
        cluster_ids=cluster_ids,
    )
    room = 2 * model.blocks[0].state_bytes
    clusters = tuple(
        replace(c, devices=tuple(replace(d, memory_bytes=d.memory_bytes + room) for d in c.devices))
        for c in world.clusters
    )
    return replace(world, clusters=clusters)
