"""A leg: steps of a round that run over one chain, from one state of all parts to the next.

A leg either ends with the states of all parts in hand, or it changes nothing that the control unit
holds. Whoever has the order and the batches of a leg can run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from collapipe_flwr.cluster.fleet import Fleet
from collapipe_flwr.cluster.guessing import Guessing, Tested, generated
from collapipe_flwr.cluster.order import RoundOrder
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage, MicroBatch, StepResult
from collapipe_flwr.pipeline.state import PartState, load_slots, slots_of
from collapipe_flwr.transport.weights import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanLoss:
    """A mean over ``targets`` labels; 0 over none."""

    loss: float
    targets: float

    @staticmethod
    def of(parts: Iterable[tuple[float, float]]) -> MeanLoss:
        """Means over parts, each with its number of labels, as one."""
        pairs = list(parts)
        targets = sum(count for _, count in pairs)
        total = sum(loss * count for loss, count in pairs)
        return MeanLoss(loss=total / targets if targets else 0.0, targets=targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """What came of it; ``state`` is that of embedding and blocks, slots only if asked for.

    ``reports`` are those of the control unit and of each device in order.
    """

    losses: tuple[float, ...]  # per optimiser step; a batch without labels makes none
    probe: MeanLoss  # before the first step
    next_step: int  # the number of the step behind this leg, evaluations counted
    state: PartState
    reports: tuple[StageReport, ...]
    moved: TransferStats  # weights to and from the devices

    def order_behind(self, order: RoundOrder) -> RoundOrder:
        """What is left of ``order`` after this leg."""
        return replace(
            order,
            weights={**order.weights, **self.state.weights},
            slots=self.state.slots,
            first_step=self.next_step,
        )


def run_leg(
    splitter: Splitter,
    order: RoundOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    probe: Iterable[Sequence[MicroBatch]] = (),
    *,
    keep_optimizer: Callable[[], bool] = lambda: False,
) -> Leg:
    """Run every batch as one optimiser step on the devices of ``fleet``, from ``order``'s state.

    ``probe`` is tested before the first. ``keep_optimizer`` is asked when the batches are through.

    Raises LinkError when a device or the edge fails or stays silent; then nothing of the leg is
    left on any device.
    """
    embedding = splitter.build_embedding(order.weights)
    optimizer = Optimizer(order.optimizer, embedding.parameters())
    load_slots(embedding, optimizer, order.slots)
    with fleet.chain(splitter, order) as chain:
        first = FirstStage(
            embedding,
            optimizer,
            order.settings(0),
            downstream=chain.link,
            shared=splitter.sums_shared,
            first_step=order.first_step,
        )
        with first.telling_neighbours():
            tested = tested_on(first, probe)
            steps = [first.train_step(batch) for batch in batches]
            first.finish()
        segments = chain.collect(keep_optimizer=keep_optimizer)
    own = {key: tensor.detach() for key, tensor in embedding.state_dict().items()}
    slots = segments.state.slots
    state = PartState(
        weights={**own, **segments.state.weights},
        slots={**slots_of(embedding, optimizer), **slots} if slots else {},
    )
    return Leg(
        losses=tuple(step.loss for step in steps if step.weight),
        probe=tested,
        next_step=first.next_step,
        state=state,
        reports=(first.report(), *segments.reports),
        moved=segments.moved,
    )


def run_test(
    splitter: Splitter,
    order: RoundOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    wanted: Guessing | None = None,
) -> Tested:
    """Loss and ``wanted`` guesses of one chain, which learns nothing; raises as ``run_leg``."""
    embedding = splitter.build_embedding(order.weights)
    optimizer = Optimizer(order.optimizer, embedding.parameters())
    judges, taken = wanted is not None and not splitter.decodes, tuple(batches)
    with fleet.chain(splitter, order) as chain:
        first = FirstStage(embedding, optimizer, order.settings(0), downstream=chain.link)
        with first.telling_neighbours():
            results = [first.evaluate(batch, guesses=judges) for batch in taken]
            guesses = tuple(result.guesses for result in results)
            if wanted is not None and splitter.decodes:
                guesses = generated(embedding, chain.link, order.settings(0), taken, wanted)
            else:
                first.finish()
    mean = _mean(results)
    return Tested(loss=mean.loss, targets=mean.targets, guesses=guesses)


def tested_on(first: FirstStage, batches: Iterable[Sequence[MicroBatch]]) -> MeanLoss:
    """The loss of the chain as it is."""
    return _mean([first.evaluate(batch) for batch in batches])


def _mean(results: Sequence[StepResult]) -> MeanLoss:
    return MeanLoss.of((result.loss, result.weight) for result in results)
