"""One loop that executes a stage's actions, whatever its place in the chain.

A stage takes its input, computes, emits; on the way back it takes a gradient, computes, passes
it on. `roles` fills in the three places: first (control unit), middle (device), last (edge).
When a stage fails, both neighbours hear why at once and no optimiser step is applied by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.pipeline.frame import GRAD, HIDDEN, Frame, FrameKind
from collapipe_flwr.pipeline.link import Link, Traffic
from collapipe_flwr.pipeline.meter import Held, MemoryMeter, Recorder, StageReport, square_norm
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.schedule import Action, Op, forward_actions, stage_actions


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """How a stage runs; `deadline_s` bounds each wait inside a step, `idle_s` between steps."""

    name: str
    schedule: str = "gpipe"
    depth: int = 1
    deadline_s: float = 60.0
    idle_s: float = 600.0
    keep_spans: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all stages know about the step in progress; `weight` is N of the whole batch."""

    index: int
    micro_batches: int
    train: bool
    weight: float

    def frame(self) -> Frame:
        """The BEGIN frame that tells the next stage."""
        scalars = {
            "micro_batches": float(self.micro_batches),
            "train": float(self.train),
            "weight": self.weight,
        }
        return Frame(kind=FrameKind.BEGIN, step=self.index, scalars=scalars)

    @staticmethod
    def of(frame: Frame, most_micro_batches: int = 65536) -> Step:
        """Read a BEGIN frame. Raises ProtocolError when it makes no sense."""
        try:
            count, train, weight = (frame.scalars[k] for k in ("micro_batches", "train", "weight"))
        except KeyError as error:
            raise ProtocolError(f"a BEGIN frame lacks the scalar {error}") from error
        if not (1 <= count <= most_micro_batches and count == int(count) and weight > 0):
            raise ProtocolError(f"a BEGIN frame with {count} micro-batches of weight {weight}")
        return Step(index=frame.step, micro_batches=int(count), train=bool(train), weight=weight)


@dataclass(slots=True, kw_only=True)
class InFlight:
    """One micro-batch between its forward and its backward."""

    hidden: Held | None  # the input whose gradient goes upstream; the first stage has none
    output: Tensor  # hidden state, or at the last stage the scaled loss
    scale: float  # n_i / N
    weight: float  # n_i


class Stage(ABC):
    """Runs one part of the model; `part` and `optimizer` outlive the stage and its links."""

    def __init__(
        self,
        part: nn.Module,
        optimizer: Optimizer,
        settings: StageSettings,
        *,
        upstream: Link | None = None,
        downstream: Link | None = None,
    ) -> None:
        self.part = part
        self.optimizer = optimizer
        self.settings = settings
        self.upstream = upstream
        self.downstream = downstream
        self.recorder = Recorder(keep_spans=settings.keep_spans)
        self.memory = MemoryMeter(self._fixed_tensors)
        self._stash: dict[int, InFlight] = {}
        self._report = StageReport(name=settings.name)

    # -- the three places differ in these ---------------------------------------------------

    @abstractmethod
    def _take(self, step: Step, micro_batch: int) -> Frame:
        """The input of one micro-batch."""

    @abstractmethod
    def _compute(self, frame: Frame, hidden: Tensor | None) -> Tensor:
        """The forward pass: the next hidden state, or the scaled loss."""

    @abstractmethod
    def _emit(self, step: Step, frame: Frame, output: Tensor) -> None:
        """Hand the output of a forward pass on."""

    @abstractmethod
    def _take_gradient(self, step: Step, micro_batch: int) -> Frame:
        """The gradient of the output and the scalars that go with it."""

    @abstractmethod
    def _emit_gradient(self, frame: Frame) -> None:
        """Hand the gradient of the input on."""

    # -- the loop ---------------------------------------------------------------------------

    def run_step(self, step: Step) -> None:
        """Execute the actions of one step; in training, apply the optimiser once at the end."""
        self.part.train(step.train)
        self._stash.clear()
        for action in self._actions(step):
            if action.op is Op.FORWARD:
                self._forward(step, action.micro_batch)
            else:
                self._backward(step, action.micro_batch)
        if step.train:
            self._apply(step)

    def report(self) -> StageReport:
        """What this stage measured since it was opened."""
        up = self.upstream.traffic if self.upstream else Traffic()
        down = self.downstream.traffic if self.downstream else Traffic()
        return replace(
            self._report,
            forward_s=self.recorder.seconds("forward"),
            backward_s=self.recorder.seconds("backward"),
            optimizer_s=self.recorder.seconds("optimizer"),
            wait_s=self.recorder.seconds("wait"),
            sent_up_bytes=up.sent_bytes,
            received_up_bytes=up.received_bytes,
            sent_down_bytes=down.sent_bytes,
            received_down_bytes=down.received_bytes,
            peak_tensor_bytes=self.memory.peak_bytes,
        )

    @contextmanager
    def telling_neighbours(self) -> Iterator[None]:
        """If the body raises, close both links with its sentence, drop the step, raise on."""
        try:
            yield
        except BaseException as error:
            self._stash.clear()
            self.optimizer.zero_grad()
            for link in filter(None, (self.upstream, self.downstream)):
                link.close(str(error) or type(error).__name__)
            raise

    def _actions(self, step: Step) -> tuple[Action, ...]:
        if not step.train:
            return forward_actions(step.micro_batches)
        return stage_actions(self.settings.schedule, self.settings.depth, step.micro_batches)

    def _forward(self, step: Step, micro_batch: int) -> None:
        frame = self._take(step, micro_batch)
        hidden = frame.tensors.get(HIDDEN)
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(step.train)
        with (
            self.recorder.span("forward", step.index, micro_batch),
            torch.set_grad_enabled(step.train),
            self.memory.saving(),
        ):
            output = self._compute(frame, hidden)
        if step.train:
            self._stash[micro_batch] = InFlight(
                hidden=None if hidden is None else self.memory.hold(hidden),
                output=output,
                scale=frame.scalars["scale"],
                weight=frame.scalars["weight"],
            )
        self._emit(step, frame, output)

    def _backward(self, step: Step, micro_batch: int) -> None:
        frame = self._take_gradient(step, micro_batch)
        with self.recorder.span("backward", step.index, micro_batch):
            flight = self._stash.pop(micro_batch)
            gradient = self._backpropagate(flight, frame.tensors)
        self.memory.sample()
        if micro_batch == 0 and flight.scale > 0:
            self._note_small(flight)
        self._emit_gradient(replace(frame, tensors=gradient))

    def _backpropagate(self, flight: InFlight, incoming: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if flight.output.requires_grad:
            flight.output.backward(incoming.get(GRAD))  # type: ignore[no-untyped-call]
        if flight.hidden is None:
            return {}
        hidden = flight.hidden.tensor
        return {GRAD: torch.zeros_like(hidden) if hidden.grad is None else hidden.grad}

    def _apply(self, step: Step) -> None:
        with self.recorder.span("optimizer", step.index):
            self._note_big(step)
            self.optimizer.step()
            self.memory.sample()
            self.optimizer.zero_grad()

    def _note_small(self, flight: InFlight) -> None:
        norm = square_norm(self._gradients()) / flight.scale**2
        self._report = replace(
            self._report,
            small_square_norm=self._mean(self._report.small_square_norm, norm),
            small_weight=self._mean(self._report.small_weight, flight.weight),
        )

    def _note_big(self, step: Step) -> None:
        norm = square_norm(self._gradients())
        self._report = replace(
            self._report,
            big_square_norm=self._mean(self._report.big_square_norm, norm),
            big_weight=self._mean(self._report.big_weight, step.weight),
            steps=self._report.steps + 1,
        )

    def _mean(self, mean: float, value: float) -> float:
        """The mean over the steps done and the one in progress."""
        return mean + (value - mean) / (self._report.steps + 1)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.optimizer.parameters if p.grad is not None]

    def _fixed_tensors(self) -> Iterator[Tensor]:
        yield from self.part.parameters()
        yield from self._gradients()
        for tensors in self.optimizer.state_tensors().values():
            yield from tensors

    # -- talking to neighbours --------------------------------------------------------------

    def _send(self, link: Link, frame: Frame) -> None:
        with self.recorder.span("wait", frame.step, frame.micro_batch):
            link.send(frame, deadline_s=self.settings.deadline_s)

    def _gradient_from(self, link: Link, step: Step, micro_batch: int) -> Frame:
        """The GRADIENT frame for one stashed output. Raises ProtocolError on a wrong shape."""
        frame = self._receive(link, FrameKind.GRADIENT, step.index, micro_batch)
        expected = self._stash[micro_batch].output.shape
        gradient = frame.tensors.get(GRAD)
        if gradient is None or gradient.shape != expected or "loss" not in frame.scalars:
            raise ProtocolError(f"{link.peer} sent no loss or no gradient of {tuple(expected)}")
        return frame

    def _receive(self, link: Link, kind: FrameKind, step: int, micro_batch: int) -> Frame:
        """The next frame of a neighbour. Raises ProtocolError unless it is the expected one."""
        with self.recorder.span("wait", step, micro_batch):
            frame = link.receive(deadline_s=self.settings.deadline_s)
        if (frame.kind, frame.step, frame.micro_batch) != (kind, step, micro_batch):
            raise ProtocolError(
                f"{link.peer} sent {frame.kind.name} of step {frame.step}, micro-batch "
                f"{frame.micro_batch}, where {kind.name} of step {step}, micro-batch "
                f"{micro_batch} was due"
            )
        return frame
