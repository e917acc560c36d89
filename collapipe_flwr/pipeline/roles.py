"""The stages of a chain by place: control unit (first), device (middle), edge (last)."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from collapipe_flwr.core.errors import (
    Blame,
    DataError,
    MemberFailed,
    NotFinite,
    ProtocolError,
    ScheduleError,
)
from collapipe_flwr.pipeline import gradient_sums
from collapipe_flwr.pipeline.compute import bring
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.generation import GeneratingEdge, relay_generation
from collapipe_flwr.pipeline.link import (
    GRAD,
    HIDDEN,
    LEARNS,
    Frame,
    FrameKind,
    Link,
    needs_gradient,
    select_context,
)
from collapipe_flwr.pipeline.notes import TAKEN
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.soundness import describe_odd
from collapipe_flwr.pipeline.stage import Stage
from collapipe_flwr.pipeline.step import LOGITS, MicroBatch, Step, StepResult
from collapipe_flwr.pipeline.targets import Targets

if TYPE_CHECKING:
    from collapipe_flwr.models.part import LossPart
    from collapipe_flwr.models.parts import SegmentPart

_SAME_SUM = 1e-6  # of weights, relative: another machine may add them in another order
_SQUARE_NORM, _FACTOR = "square_norm", "factor"
_CONSTANT = repeat(1.0)
_PREDICTIONS = "guesses."  # and the number of a micro-batch: tensors of TOTALS


class _Leader(Stage):
    """A stage that passes its output on to the next one."""

    downstream: Link

    def _emit(self, frame: Frame, output: Tensor) -> None:
        """Send the hidden state, and whether its gradient is needed."""
        learns = self._learns or needs_gradient(frame)
        activation = replace(
            frame,
            tensors={**frame.tensors, HIDDEN: output.detach()},
            scalars={**frame.scalars, LEARNS: float(learns)},
        )
        self._send(self.downstream, activation)

    def _take_gradient(self, step: Step, micro_batch: int) -> Frame:
        """Receive the gradient; raises ProtocolError on a wrong shape."""
        frame = self._receive(self.downstream, FrameKind.GRADIENT, step.index, micro_batch)
        flight = self._stash[micro_batch]
        gradient, wanted = frame.tensors.get(GRAD), self._learns or needs_gradient(flight.frame)
        fits = gradient is not None and gradient.shape == flight.shape
        if (wanted and not fits) or "loss" not in frame.scalars:
            with self._blame(self.downstream):
                raise ProtocolError(
                    f"{self.downstream.peer} sent no loss or no gradient of {tuple(flight.shape)}"
                )
        return frame


class FirstStage(_Leader):
    """Holds the embedding, scales the losses and drives the chain.

    With `shared` the stages sum the gradients of parameters that several of them hold. With a
    `clip_norm` in its settings all stages scale their gradients so that the norm over the whole
    model is at most that (as `torch.nn.utils.clip_grad_norm_`), and none applies a step before all
    have computed it. `rates` are the factors of the learning rates, one per optimizer step. With
    `targets` a micro-batch's targets are left there instead of being sent.
    """

    def __init__(
        self,
        part: nn.Module,
        optimizer: Optimizer,
        settings: StageConfig,
        *,
        downstream: Link,
        shared: bool = False,
        first_step: int = 0,
        rates: Iterator[float] = _CONSTANT,
        targets: Targets | None = None,
    ) -> None:
        super().__init__(part, optimizer, settings, downstream=downstream)
        self._shared = shared
        self._clip_norm = settings.execution.clip_norm
        self._gradient_norm: float | None = None
        self._batch: Sequence[MicroBatch] = ()
        self._loss = 0.0
        self.next_step = first_step  # evaluations count as well
        self._rates = rates
        self._targets = targets

    def train_step(self, batch: Sequence[MicroBatch]) -> StepResult:
        """Run one optimizer step of all stages; none, and loss 0, for a batch without any label.

        Raises LinkError when the chain fails.
        """
        return self._drive(batch, train=True)

    def evaluate(self, batch: Sequence[MicroBatch], *, predict: str = "") -> StepResult:
        """Compute the loss without training, and predictions.

        ``predict`` is "classes" for the ids (B,) or (B, T) of the best ones, or "logits".
        """
        return self._drive(batch, train=False, predict=predict)

    def finish(self) -> None:
        """End the chain after the last step."""
        with self.tell_neighbours():
            self._send(self.downstream, Frame(kind=FrameKind.END, step=self.next_step))

    def _drive(self, batch: Sequence[MicroBatch], *, train: bool, predict: str = "") -> StepResult:
        private = train and self.settings.privacy is not None
        # Nothing in a private step may depend on how many labels its examples have.
        weight = float(len(batch) if private else sum(m.weight for m in batch))
        if not (batch and weight >= 0):
            raise ScheduleError(f"a batch of {len(batch)} micro-batches weighs {weight}")
        if not (weight or predict):
            self.next_step += 1
            return StepResult(loss=0.0, weight=0.0)
        step = Step(
            index=self.next_step,
            micro_batches=len(batch),
            train=train,
            weight=weight,
            settle=train and (self._shared or self._clip_norm > 0),
            predict=predict,
            rate=next(self._rates) if train else 1.0,
            seed=self.settings.seed,
            rows=gradient_sums.collect_rows(self.part, (m.inputs for m in batch)),
        )
        self._batch, self._loss, self._gradient_norm = batch, 0.0, None
        found: tuple[Tensor, ...] = ()
        with self._name_odd_input(step), self.tell_neighbours():
            self._send(self.downstream, step.make_frame())
            if step.rows:
                lent = self._get(self.downstream, FrameKind.ROWS, step.index, 0)
                gradient_sums.load_rows(self.part, bring(step.rows, self.place), lent.tensors)
            self.run_step(step)
            if not train:
                frame = self._receive(self.downstream, FrameKind.TOTALS, step.index, 0)
                self._loss = _read_scalar(frame, "loss")
                found = _read_predictions(frame, step) if predict else ()
        self.next_step += 1
        return StepResult(
            loss=self._loss, weight=weight, gradient_norm=self._gradient_norm, predictions=found
        )

    @contextmanager
    def _name_odd_input(self, step: Step) -> Iterator[None]:
        """Raise DataError where numbers in the body went wrong because of an odd example."""
        try:
            yield
        except (MemberFailed, NotFinite) as error:
            if isinstance(error, MemberFailed) and error.blame is not Blame.UNSOUND:
                raise
            for number, micro_batch in enumerate(self._batch):
                if odd := describe_odd({**micro_batch.context, **micro_batch.inputs}):
                    raise DataError(
                        f"the model computes no finite numbers in step {step.index}, whose "
                        f"micro-batch {number} has {odd}: mend or leave out such examples"
                    ) from error
            raise

    def _take(self, step: Step, micro_batch: int) -> Frame:
        taken = self._batch[micro_batch]
        weight, sent = taken.weight, dict(taken.context)
        if self._targets is not None:
            held = {name: sent.pop(name) for name in taken.targets}
            self._targets.put(step.index, micro_batch, held)
        # Means weigh n_i / N, so that their sum is the mean over the whole batch. Private
        # examples weigh the same, however many labels they have.
        share = 1.0 if step.train and self.settings.privacy is not None else weight
        return Frame(
            kind=FrameKind.ACTIVATION,
            step=step.index,
            micro_batch=micro_batch,
            tensors=sent,
            scalars={"weight": weight, "scale": share / (step.weight or 1.0), LEARNS: 0.0},
        )

    def _compute(self, frame: Frame, hidden: Tensor | None) -> Tensor:
        assert hidden is None
        inputs = bring(self._batch[frame.micro_batch].inputs, self.place)
        output: Tensor = self.part(inputs)
        if self._noise is not None:
            self._noise.at = (frame.step, frame.micro_batch)
            output = self._noise(output, inputs.get("attention_mask"))
        return output

    def _emit(self, frame: Frame, output: Tensor) -> None:
        """Add the tensors that blocks read besides hidden states, if the part names any."""
        found: dict[str, Tensor] = getattr(self.part, "block_context", dict)()
        super()._emit(frame.carry({**frame.tensors, **found}), output)

    def _emit_gradient(self, frame: Frame) -> None:
        self._loss += frame.scalars["loss"]

    def _return_rows(self, step: Step) -> None:
        gradients = gradient_sums.read_row_gradients(self.part, step.rows)
        self._send(self.downstream, Frame(kind=FrameKind.ROWS, step=step.index, tensors=gradients))

    def _settle(self, step: Step, square_norm: float) -> float:
        totals = self._get(self.downstream, FrameKind.TOTALS, step.index, 0)
        shared = gradient_sums.add_shared(self.part, totals.tensors, self.optimizer)
        gradient_sums.take_shared(self.part, shared)
        of_shared = sum(float(gradient.square().sum()) for gradient in shared.values())
        behind = self._read_amount(self.downstream, totals, _SQUARE_NORM, sys.float_info.max)
        norm = (square_norm + behind + of_shared) ** 0.5
        factor = 1.0
        if self._clip_norm > 0:
            self._gradient_norm = norm
            factor = min(self._clip_norm / (norm + 1e-6), 1.0)
        commit = Frame(
            kind=FrameKind.COMMIT, step=step.index, tensors=shared, scalars={_FACTOR: factor}
        )
        self._send(self.downstream, commit)
        return factor


class _Follower(Stage):
    """A stage that executes the orders of its upstream neighbour."""

    upstream: Link

    def serve(self) -> None:
        """Run steps until the END frame. Raises LinkError when a neighbour fails."""
        with self.tell_neighbours():
            while (frame := self._take_order()).kind is not FrameKind.END:
                if frame.kind is FrameKind.SERVE:
                    self._relay(frame)
                    self._generate(frame)
                    return
                with self._blame(self.upstream):
                    step = Step.from_frame(frame)
                self._relay(frame)
                self.run_step(step)
                if not step.train:
                    self._send(self.upstream, self._collect_totals(step))
            self._relay(frame)

    def _take_order(self) -> Frame:
        with self._blame(self.upstream):
            frame = self.upstream.receive(deadline_s=self.settings.pause_s)
            if frame.kind not in (FrameKind.BEGIN, FrameKind.END, FrameKind.SERVE):
                raise ProtocolError(
                    f"{self.upstream.peer} sent {frame.kind.name} between two steps"
                )
        self._note(TAKEN, self.upstream, frame)
        return frame

    def _relay(self, frame: Frame) -> None:
        if self.downstream is not None:
            self._send(self.downstream, frame)

    @abstractmethod
    def _generate(self, order: Frame) -> None:
        """Generate texts until END, which is passed on to the stages behind."""

    @abstractmethod
    def _collect_totals(self, step: Step) -> Frame:
        """Return the TOTALS frame of the stages behind, which the last stage begins.

        In training it holds the squared gradient norm and shared gradients, in an evaluation loss,
        weight and predictions.
        """

    def _settle(self, step: Step, square_norm: float) -> float:
        behind = self._bring(self._collect_totals(step))
        sender = self.downstream or self.upstream  # the last stage makes its own
        of_others = self._read_amount(sender, behind, _SQUARE_NORM, sys.float_info.max)
        totals = replace(
            behind,
            tensors=gradient_sums.add_shared(self.part, behind.tensors, self.optimizer),
            scalars={_SQUARE_NORM: square_norm + of_others},
        )
        self._send(self.upstream, totals)
        commit = self._receive(self.upstream, FrameKind.COMMIT, step.index, 0)
        factor = self._read_amount(self.upstream, commit, _FACTOR, 1.0)
        self._relay(commit)
        gradient_sums.take_shared(self.part, bring(commit.tensors, self.place))
        return factor

    def _take(self, step: Step, micro_batch: int) -> Frame:
        frame = self._receive(self.upstream, FrameKind.ACTIVATION, step.index, micro_batch)
        scale, weight = frame.scalars.get("scale", -1.0), frame.scalars.get("weight", -1.0)
        if HIDDEN not in frame.tensors or not scale >= 0 or not weight >= 0:
            with self._blame(self.upstream):
                raise ProtocolError(
                    f"{self.upstream.peer} sent an ACTIVATION without hidden state or scale"
                )
        return frame

    def _emit_gradient(self, frame: Frame) -> None:
        self._send(self.upstream, frame)


class MiddleStage(_Follower, _Leader):
    """Holds a segment of blocks: `part(hidden, context) -> hidden`."""

    def __init__(
        self, part: nn.Module, optimizer: Optimizer, settings: StageConfig, **links: Any
    ) -> None:
        super().__init__(part, optimizer, settings, **links)
        if self._noise is not None and settings.activations is not None:
            cast("SegmentPart", part).perturb(settings.activations.behind, self._noise)

    def _compute(self, frame: Frame, hidden: Tensor | None) -> Tensor:
        if self._noise is not None:
            self._noise.at = (frame.step, frame.micro_batch)
        output: Tensor = self.part(hidden, select_context(frame))
        return output

    def run_step(self, step: Step) -> None:
        """Run a step, see `Stage.run_step`; borrowed rows are passed on upstream."""
        if step.rows:
            self._send(self.upstream, self._receive(self.downstream, FrameKind.ROWS, step.index, 0))
        super().run_step(step)

    def _return_rows(self, step: Step) -> None:
        self._relay(self._receive(self.upstream, FrameKind.ROWS, step.index, 0))

    def _generate(self, order: Frame) -> None:
        _ = order
        relay_generation(self.part, self.upstream, self.downstream, self.settings)

    def _collect_totals(self, step: Step) -> Frame:
        return self._receive(self.downstream, FrameKind.TOTALS, step.index, 0)


class LastStage(_Follower):
    """Holds the loss: `part(hidden, context) -> mean loss`, and starts the backward passes.

    The part has a `weight_of`, and a `judge` for predictions. With `targets` those of a micro-batch
    come from there instead of with its frame.
    """

    def __init__(
        self,
        part: nn.Module,
        optimizer: Optimizer,
        settings: StageConfig,
        *,
        upstream: Link,
        targets: Targets | None = None,
    ) -> None:
        super().__init__(part, optimizer, settings, upstream=upstream)
        self._targets = targets

    def run_step(self, step: Step) -> None:
        self._loss = 0.0
        self._losses: dict[int, float] = {}  # of the micro-batches in flight
        self._predicts = "" if step.train else step.predict
        self._predictions: dict[str, Tensor] = {}
        if step.rows:
            rows = gradient_sums.lend_rows(self.part, bring(step.rows, self.place))
            self._send(self.upstream, Frame(kind=FrameKind.ROWS, step=step.index, tensors=rows))
        super().run_step(step)

    def _compute(self, frame: Frame, hidden: Tensor | None) -> Tensor:
        assert hidden is not None
        context, part = select_context(frame), cast("LossPart", self.part)
        if self._targets is not None:
            held = self._targets.take(frame.step, frame.micro_batch)
            context |= bring(held, self.place)
        counted = part.weight_of(context)
        if not math.isclose(counted, frame.scalars["weight"], rel_tol=_SAME_SUM):
            raise ProtocolError(
                f"{self.upstream.peer} gave micro-batch {frame.micro_batch} the weight "
                f"{frame.scalars['weight']:g}, but its labels count {counted:g}"
            )
        mean: Tensor
        if self._predicts:
            scores = self._predicts == LOGITS
            mean, predictions = part.judge(hidden, context, scores=scores)
            self._predictions[f"{_PREDICTIONS}{frame.micro_batch}"] = predictions
        else:
            mean = self.part(hidden, context)
        return mean * frame.scalars["scale"]

    def _emit(self, frame: Frame, output: Tensor) -> None:
        self._losses[frame.micro_batch] = float(output.detach())
        self._loss += self._losses[frame.micro_batch]

    def _take_gradient(self, step: Step, micro_batch: int) -> Frame:
        weight = self._stash[micro_batch].frame.scalars["weight"]
        return Frame(
            kind=FrameKind.GRADIENT,
            step=step.index,
            micro_batch=micro_batch,
            scalars={"loss": self._losses.pop(micro_batch), "weight": weight},
        )

    def _return_rows(self, step: Step) -> None:
        gradients = self._get(self.upstream, FrameKind.ROWS, step.index, 0).tensors
        gradient_sums.add_row_gradients(self.part, bring(step.rows, self.place), gradients)

    def _generate(self, order: Frame) -> None:
        GeneratingEdge(self.part, self.upstream, self.settings, order).serve()

    def _collect_totals(self, step: Step) -> Frame:
        settled = {_SQUARE_NORM: 0.0}
        evaluated = {"loss": self._loss, "weight": step.weight}
        return Frame(
            kind=FrameKind.TOTALS,
            step=step.index,
            tensors=self._predictions,
            scalars=settled if step.train else evaluated,
        )


def _read_scalar(frame: Frame, name: str) -> float:
    """Read one scalar of a frame. Raises ProtocolError when it is missing."""
    if name not in frame.scalars:
        raise ProtocolError(f"{frame.kind.name} of step {frame.step} lacks the scalar {name}")
    return frame.scalars[name]


def _read_predictions(frame: Frame, step: Step) -> tuple[Tensor, ...]:
    """Read predictions by micro-batch. Raises ProtocolError for one missing or of another kind."""
    names = [f"{_PREDICTIONS}{index}" for index in range(step.micro_batches)]
    if lost := [name for name in names if name not in frame.tensors]:
        raise ProtocolError(f"{frame.kind.name} of step {frame.step} lacks {lost[0]}")
    found = tuple(frame.tensors[name] for name in names)
    if any(tensor.is_floating_point() is not (step.predict == LOGITS) for tensor in found):
        raise ProtocolError(
            f"{frame.kind.name} of step {frame.step} holds other predictions than {step.predict}: "
            "the edge may be of an older version"
        )
    return found
