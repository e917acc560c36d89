"""A replay interval: steps of a round that run over one chain, between two states of all parts.

An interval either ends with the states of all parts in hand, or it changes nothing that the control
unit holds. It can be run again from its order and its batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig, generate_texts
from collapipe_flwr.cluster.fleet import Fleet, RoundOrder
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.pipeline.state import PartState, load_optimizer_state, optimizer_state_of
from collapipe_flwr.pipeline.step import MicroBatch, StepResult
from collapipe_flwr.transport.weights import TransferStats


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInterval:
    """The result of an interval; ``state`` is that of embedding and blocks, slots if asked for.

    ``reports`` are those of the control unit and of each device in order.
    """

    losses: tuple[float, ...]  # per optimiser step; a batch without labels makes none
    probe: EvalResult  # before the first step
    next_step: int  # the number of the step after this interval, evaluations counted
    state: PartState
    reports: tuple[StageReport, ...]
    moved: TransferStats  # weights to and from the devices

    def remaining(self, order: RoundOrder) -> RoundOrder:
        """What is left of ``order`` after this interval."""
        return replace(
            order,
            weights={**order.weights, **self.state.weights},
            slots=self.state.optimizer,
            first_step=self.next_step,
        )


def run_interval(
    splitter: Splitter,
    order: RoundOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    probe: Iterable[Sequence[MicroBatch]] = (),
    *,
    keep_optimizer: Callable[[], bool] = lambda: False,
) -> ReplayInterval:
    """Run every batch as one optimiser step on the devices of ``fleet``, from ``order``'s state.

    ``probe`` is tested before the first. ``keep_optimizer`` is asked when the batches are through.

    Raises LinkError when a device or the edge fails or stays silent; then nothing of the interval
    is left on any device.
    """
    embedding = splitter.build_embedding(order.weights)
    optimizer = Optimizer(order.optimizer, embedding.parameters())
    load_optimizer_state(embedding, optimizer, order.slots)
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
            tested = EvalResult.mean(_losses(first.evaluate(batch) for batch in probe))
            steps = [first.train_step(batch) for batch in batches]
            first.finish()
        segments = chain.collect(keep_optimizer=keep_optimizer)
    own = {key: tensor.detach() for key, tensor in embedding.state_dict().items()}
    kept = segments.state.optimizer
    state = PartState(
        weights={**own, **segments.state.weights},
        optimizer={**optimizer_state_of(embedding, optimizer), **kept} if kept else {},
    )
    return ReplayInterval(
        losses=tuple(step.loss for step in steps if step.weight),
        probe=tested,
        next_step=first.next_step,
        state=state,
        reports=(first.report(), *segments.reports),
        moved=segments.moved,
    )


def evaluate_chain(
    splitter: Splitter,
    order: RoundOrder,
    batches: Iterable[Sequence[MicroBatch]],
    fleet: Fleet,
    wanted: PredictionConfig | None = None,
) -> EvalResult:
    """Loss and predictions of one chain, which learns nothing; raises as ``run_interval``."""
    embedding = splitter.build_embedding(order.weights)
    optimizer = Optimizer(order.optimizer, embedding.parameters())
    classifies, taken = wanted is not None and not splitter.decodes, tuple(batches)
    with fleet.chain(splitter, order) as chain:
        first = FirstStage(embedding, optimizer, order.settings(0), downstream=chain.link)
        with first.telling_neighbours():
            results = [first.evaluate(batch, predict=classifies) for batch in taken]
            predictions = tuple(result.predictions for result in results)
            if wanted is not None and splitter.decodes:
                predictions = generate_texts(
                    embedding, chain.link, order.settings(0), taken, wanted
                )
            else:
                first.finish()
    return EvalResult.mean(_losses(results), predictions)


def _losses(results: Iterable[StepResult]) -> Iterator[tuple[float, float]]:
    return ((result.loss, result.weight) for result in results)
