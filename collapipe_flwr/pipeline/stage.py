"""The loop that executes the actions of a stage, for any place in the chain.

A stage receives its input, computes and sends its output, and in the backward pass a gradient.
`roles` implements the three places: first (control unit), middle (device), last (edge). A stage
that fails sends the error to all neighbours at once and applies no optimizer step.
"""

from __future__ import annotations

import math
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import MemberFailed, ModelError, NotFinite, ProtocolError
from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.core.schedule import Op, list_forward_actions, list_stage_actions
from collapipe_flwr.pipeline.backward import DeferredGradients, defer_products, fuse_accumulation
from collapipe_flwr.pipeline.compute import (
    bring,
    bring_home,
    compute_in,
    find_place,
    finish,
    use_one_thread,
)
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.gradient_sums import Siblings, borrows, find_shared_parameters
from collapipe_flwr.pipeline.link import (
    GRAD,
    HIDDEN,
    Frame,
    FrameKind,
    Link,
    choose_lane,
    needs_gradient,
    select_context,
)
from collapipe_flwr.pipeline.meter import MemoryMeter, Recorder, sum_squares
from collapipe_flwr.pipeline.notes import GIVEN, TAKEN, FrameNotes, describe_rounding
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.private_activations import PrivateActivations
from collapipe_flwr.pipeline.private_gradients import PrivateGradients
from collapipe_flwr.pipeline.randomness import SeededRandomness
from collapipe_flwr.pipeline.soundness import (
    blame,
    check_finite,
    check_sound,
    make_neighbours_error,
)
from collapipe_flwr.pipeline.step import InFlight, Step, find_end

Around = AbstractContextManager[None]
WEIGHTS = "weights"  # work: the part of a backward pass that is done after its gradient was sent

# What a part may raise because of its inputs, an error in its code, or memory that runs out.
_PART_ERRORS = (
    *(RuntimeError, ValueError, LookupError, TypeError, MemoryError),
    *(AttributeError, AssertionError, ArithmeticError, ImportError),
)


class Stage(ABC):
    """Runs one part of the model; `part` and `optimizer` outlive the stage and its links."""

    def __init__(
        self,
        part: nn.Module,
        optimizer: Optimizer,
        settings: StageConfig,
        *,
        upstream: Link | None = None,
        downstream: Link | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        self.part = part
        self.place = find_place(part)
        self.optimizer = optimizer
        self.settings = settings
        self.upstream = upstream
        self.downstream = downstream
        self.siblings = siblings  # the other replicas of this stage
        self.recorder = Recorder(
            keep_spans=settings.execution.keep_spans, finish=partial(finish, self.place)
        )
        self.memory = MemoryMeter()
        fuse_accumulation(part)
        self._randomness: SeededRandomness | None = None  # of the step; else torch's own
        self._stash: dict[int, InFlight] = {}
        # False: the backward pass computes the whole part again
        self._keeps_graph = not settings.execution.recompute or self._recompute_by_block()
        self._returning = Frame(kind=FrameKind.ACTIVATION)  # whose backward pass runs
        self._sent: list[object] = []  # see `_send`
        self._steps = StageMeasurement(name=settings.name)  # their number, and norms of gradients
        self._first = StageMeasurement(name=settings.name)  # of a step's first micro-batch
        self._mode: bool | None = None  # of the part: it trains, or not
        self._micro_batches = 0  # in training
        self._weights = tuple(part.parameters())
        self._learns = borrows(part) or any(weight.requires_grad for weight in self._weights)
        self._private = None
        if settings.privacy is not None:
            self._private = PrivateGradients(part, optimizer.by_name, settings.privacy)
        noise = settings.activations
        self._noise = None if noise is None else PrivateActivations(noise)
        self._notes = FrameNotes() if settings.audited else None
        self._note_fixed()

    # -- the three places differ in these ---------------------------------------------------

    @abstractmethod
    def _take(self, step: Step, micro_batch: int) -> Frame:
        """Return the input of one micro-batch."""

    @abstractmethod
    def _compute(self, frame: Frame, hidden: Tensor | None) -> Tensor:
        """Run the forward pass: the next hidden state, or the scaled loss."""

    @abstractmethod
    def _emit(self, frame: Frame, output: Tensor) -> None:
        """Pass the output of a forward pass on."""

    @abstractmethod
    def _take_gradient(self, step: Step, micro_batch: int) -> Frame:
        """Return the gradient of the output and its scalars."""

    @abstractmethod
    def _emit_gradient(self, frame: Frame) -> None:
        """Pass the gradient of the input on."""

    @abstractmethod
    def _return_rows(self, step: Step) -> None:
        """Pass the gradients of borrowed rows on to the last stage."""

    @abstractmethod
    def _settle(self, step: Step, square_norm: float) -> float:
        """Sum up gradients with the other stages; returns the factor to scale all gradients by."""

    # -- the loop ---------------------------------------------------------------------------

    def run_step(self, step: Step) -> None:
        """Execute the actions of one step; in training, apply the optimizer once at the end."""
        if self._mode is not step.train:  # `train` takes milliseconds
            self.part.train(step.train)
            self._mode = step.train
        self._stash.clear()
        if self._private is not None:
            self._private.forget()
        self._randomness = self._choose_randomness(step)
        if step.train and self.siblings:
            self.siblings.check(self.part)
        own, count = self.settings, step.micro_batches
        if step.train:
            actions = list_stage_actions(own.schedule, own.depth, count, own.turn)
        else:
            actions = list_forward_actions(count, own.turn)
        with self._randomness.hook_modules() if self._randomness else nullcontext():
            for action in actions:
                run = self._forward if action.op is Op.FORWARD else self._backward
                run(step, action.micro_batch)
        if step.train:
            self._apply(step)
        self._sent.clear()

    def report(self) -> StageMeasurement:
        """Return the measurements of this stage since it was opened."""
        up, down = self.upstream, self.downstream
        return replace(
            self._steps,
            micro_batches=self._micro_batches,
            forward_s=self.recorder.sum_seconds("forward"),
            backward_s=self.recorder.sum_seconds("backward") + self.recorder.sum_seconds(WEIGHTS),
            optimizer_s=self.recorder.sum_seconds("optimizer"),
            wait_s=self.recorder.sum_seconds("send") + self.recorder.sum_seconds("receive"),
            sent_up=replace(up.sent) if up else LinkTraffic(),
            received_up=replace(up.received) if up else LinkTraffic(),
            sent_down=replace(down.sent) if down else LinkTraffic(),
            received_down=replace(down.received) if down else LinkTraffic(),
            sent_beside_bytes=self.siblings.sent_bytes if self.siblings else 0,
            peak_tensor_bytes=self.memory.peak_bytes,
            spans=tuple(self.recorder.spans),
            notes=self._notes.encode() if self._notes else {},
            rounding=describe_rounding(self.place) if self._notes else "",
        )

    @contextmanager
    def tell_neighbours(self) -> Iterator[None]:
        """Close all links with the body's error if it raises; drop the step and re-raise."""
        try:
            yield
        except BaseException as error:
            self._stash.clear()
            self._sent.clear()
            self.optimizer.zero_grad()
            for neighbour in (self.upstream, self.downstream, self.siblings):
                if neighbour is not None:
                    neighbour.close(make_neighbours_error(error, self.settings.name))
            raise

    def _recompute_by_block(self) -> bool:
        """Turn on activation checkpointing by block; returns whether the part supports it."""
        begin = getattr(self.part, "compute_again", None)
        stage = weakref.proxy(self)  # else part and stage would keep each other alive
        if begin is not None:
            begin(lambda: stage._enter_recomputed())
        return begin is not None

    @contextmanager
    def _enter_recomputed(self) -> Iterator[None]:
        """Set the context of a recomputed block, which autograd does not restore."""
        with (
            compute_in(self.settings.execution.precision, self.place),
            self.memory.measure_recomputed(self._weights),
            self._seed_pass(self._returning),
        ):
            yield

    def _choose_randomness(self, step: Step) -> SeededRandomness | None:
        """Seed the step if need be: `recompute` must draw the masks of the first computation."""
        if step.seed is None and not self.settings.execution.recompute:
            return None
        seed = secrets.randbits(48) if step.seed is None else step.seed
        whole = getattr(self.part, "model", self.part)  # transformers parts name modules there
        return SeededRandomness(whole, seed)

    def _seed_pass(self, frame: Frame) -> Around:
        """Seed the random numbers of one micro-batch, in a forward pass or a recomputation."""
        if self._randomness is None:
            return nullcontext()
        return self._randomness.seed_at(frame.step, frame.micro_batch)

    def _forward(self, step: Step, micro_batch: int) -> None:
        came = self._take(step, micro_batch)
        frame = self._bring(came)
        hidden = frame.tensors.get(HIDDEN)
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(step.train and needs_gradient(frame))
        with self.recorder.record("forward" if step.train else "test", step.index, micro_batch):
            output = self._run_part(frame, hidden, grad=step.train and self._keeps_graph)
        self._check_finite("forward", frame, hidden, output)
        if step.train:
            self._stash[micro_batch] = InFlight(
                frame=frame.carry(select_context(frame)),
                hidden=hidden,
                end=find_end(output),
                shape=output.shape,
            )
        self._sent = [frame, output]
        self._emit(came, output)

    def _run_part(self, frame: Frame, hidden: Tensor | None, *, grad: bool) -> Tensor:
        """Run the forward pass. Raises ModelError when the part cannot take these tensors."""
        tensors = frame.tensors.values()
        kind = (grad, hidden is None or hidden.shape, *(t.shape for t in tensors))
        try:
            with (
                torch.set_grad_enabled(grad),
                compute_in(self.settings.execution.precision, self.place),
                self.memory.measure_saved(kind, self._weights, (*tensors, hidden)),
                self._seed_pass(frame),
            ):
                output = self._compute(frame, hidden)
        except _PART_ERRORS as error:
            shapes = {name: tuple(t.shape) for name, t in frame.tensors.items()}
            raise ModelError(
                f"{self.settings.name} cannot compute micro-batch {frame.micro_batch} of step "
                f"{frame.step} with tensors {shapes}: {error}"
            ) from error
        if self.part.training:
            self.memory.hold(frame.micro_batch, kind)
        return output

    def _backward(self, step: Step, micro_batch: int) -> None:
        frame = self._bring(self._take_gradient(step, micro_batch))
        with self.recorder.record("backward", step.index, micro_batch):
            flight = self._stash.pop(micro_batch)
            gradient, deferred = self._backpropagate(flight, frame.tensors)
        self._check_finite("backward", frame, frame.tensors.get(GRAD), gradient.get(GRAD))
        self._sent = []
        self._emit_gradient(frame.carry(gradient))
        if deferred is not None:
            with self.recorder.record(WEIGHTS, step.index, micro_batch):
                deferred.add()
        self.memory.release(micro_batch)
        self._micro_batches += 1
        if micro_batch == 0:
            self._note_fixed()
        if self._private is not None:  # no number of a single example may be reported
            self._private.add_example(flight.frame.scalars["scale"])
        elif micro_batch == 0:
            # The gradient that it would have alone: the accumulated one carries the factor n_i / N.
            # Both norms give the gradient noise (docs/theory.md, 4.4).
            scalars = flight.frame.scalars
            norm, scale, weight = (
                sum_squares(self._list_gradients()),
                scalars["scale"],
                scalars["weight"],
            )
            if scale > 0:
                self._first = StageMeasurement(
                    name=self.settings.name,
                    small_square_norm=norm / scale**2,
                    small_weight=weight,
                    small_squares=weight**2,
                )

    def _backpropagate(
        self, flight: InFlight, incoming: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], DeferredGradients | None]:
        """Return the gradient for the previous stage, and the deferred weight gradients.

        With activation checkpointing none are deferred, since that would keep activations.
        """
        end, hidden, frame = flight.end, flight.hidden, flight.frame
        wanted = hidden is not None and hidden.requires_grad
        if not self._keeps_graph:
            end = find_end(self._run_part(frame, hidden, grad=True))
        self._returning = frame
        deferred = None
        if end is not None:
            hurries = wanted and not self.settings.execution.recompute
            with (
                use_one_thread(self.place),
                defer_products() if hurries else nullcontext() as deferred,
            ):
                torch.autograd.backward(end, incoming.get(GRAD))
        if deferred is not None:
            self.memory.note_rest(frame.micro_batch, deferred.tensors)
        if hidden is None or not wanted:
            return {}, deferred
        return {GRAD: torch.zeros_like(hidden) if hidden.grad is None else hidden.grad}, deferred

    def _check_finite(
        self, direction: str, frame: Frame, taken: Tensor | None, given: Tensor | None
    ) -> None:
        if self.settings.execution.check_finite and given is not None:
            blocks = getattr(self.part, "block_range", None)
            holding = "" if blocks is None else f" (blocks {blocks[0]}-{blocks[-1]})"
            what = f"the {direction} pass of {self.settings.name}{holding}"
            clips = self.settings.execution.clip_norm > 0
            check_finite(what, frame, taken, given, clips=clips)

    def _apply(self, step: Step) -> None:
        with self.recorder.record("optimizer", step.index):
            norm = self._measure_gradients(step)
        if step.rows or self._private is not None or self.siblings is not None:
            self._exchange_gradients(step)
            norm = sum_squares(self._list_gradients())
        # That of shared parameters is added in `gradient_sums.add_shared`.
        shared = find_shared_parameters(self.part) if step.settle else {}
        self.optimizer.add_proximal(n for n in self.optimizer.by_name if n not in shared)
        factor = 1.0
        if step.settle:
            changed = shared or self.optimizer.settings.proximal_mu
            factor = self._settle(step, self._sum_own_squares() if changed else norm)
        with self.recorder.record("optimizer", step.index):
            if factor != 1.0 and (gradients := self._list_gradients()):
                torch._foreach_mul_(gradients, factor)
            self._steps += replace(
                self._first,
                steps=1,
                big_square_norm=0.0 if self.settings.turn.replica else norm,
                big_weight=step.weight,
                big_squares=step.weight**2,
            )
            self._first = StageMeasurement(name=self.settings.name)
            self.optimizer.step(step.rate)
            self._note_fixed()
            self.optimizer.zero_grad()
        self._note_fixed()

    def _measure_gradients(self, step: Step) -> float:
        """Return the squared norm of the part's gradients.

        Raises NotFinite if they would spoil those of other stages, when added.
        """
        norm = sum_squares(self._list_gradients())
        adds = step.settle or step.rows or self.siblings is not None
        if adds and not math.isfinite(norm):
            raise NotFinite(
                f"the gradients of {self.settings.name} in step {step.index} are not finite, or "
                "too large to be right"
            )
        return norm

    def _exchange_gradients(self, step: Step) -> None:
        """Add those of other parts and replicas, and the noise of private training."""
        if step.rows:
            self._return_rows(step)
        if self._private is not None:
            self._private.put_sums()
        if self.siblings is not None:
            self.siblings.check(self.part)
            self.siblings.all_reduce(self.optimizer.by_name, step.index, self._send, self._get)
        if self._private is not None:
            self._private.add_noise(step.index, 1.0 / step.weight)

    def _list_gradients(self) -> list[Tensor]:
        return [p.grad for p in self.optimizer.parameters if p.grad is not None]

    def _sum_own_squares(self) -> float:
        """Return the squared norm of the gradients that no other stage adds to."""
        shared = {id(p) for p in find_shared_parameters(self.part).values()}
        own = (p for p in self.optimizer.parameters if id(p) not in shared)
        return sum_squares([p.grad for p in own if p.grad is not None])

    @property
    def tensors(self) -> list[Tensor]:
        """Weights and optimizer state."""
        state = self.optimizer.collect_state().values()
        return [*self._weights, *chain.from_iterable(state)]

    def _note_fixed(self) -> None:
        gradients = self._list_gradients()
        kind = len(gradients), self.optimizer.num_states
        self.memory.set_fixed(kind, lambda: chain(self.tensors, gradients))

    # -- links to neighbours ----------------------------------------------------------------

    def _send(self, link: Link, frame: Frame) -> None:
        """Queue a frame, whose tensors are kept until the next pass or the end of the step.

        Freeing a tensor releases the GIL. Freed at once, the thread that sends the frame would take
        the GIL then, and this one would wait before it goes on computing.
        """
        self._sent.append(frame)
        frame = _replace_tensors(frame, bring_home(frame.tensors))
        self._note(GIVEN, link, frame)
        with self._blame(link), self.recorder.record("send", frame.step, frame.micro_batch):
            link.send(frame, deadline_s=self.settings.deadline_s)

    def _receive(self, link: Link, kind: FrameKind, step: int, micro_batch: int) -> Frame:
        """Receive a frame from a neighbour. Raises ProtocolError for an unexpected one."""
        side, link = self._find_side(link), choose_lane(link, kind, micro_batch)
        with blame(self.settings.name, link, side):
            with self.recorder.record("receive", step, micro_batch):
                frame = link.receive(deadline_s=self.settings.deadline_s)
            if (frame.kind, frame.step, frame.micro_batch) != (kind, step, micro_batch):
                raise ProtocolError(
                    f"{link.peer} sent {frame.kind.name} of step {frame.step}, micro-batch "
                    f"{frame.micro_batch}, where {kind.name} of step {step}, micro-batch "
                    f"{micro_batch} was due"
                )
            check_sound(frame, self.settings.name, link, side)
        self._note(TAKEN, link if side == MemberFailed.DOWNSTREAM else self.upstream, frame)
        return frame

    def _get(self, link: Link, kind: FrameKind, step: int, number: int) -> Frame:
        """Receive as `_receive`, with the tensors on the part's device."""
        return self._bring(self._receive(link, kind, step, number))

    def _read_amount(self, link: Link, frame: Frame, name: str, most: float) -> float:
        """Read a scalar from a link; raises ProtocolError unless it is in [0, ``most``]."""
        found = frame.scalars.get(name, math.nan)
        with self._blame(link):
            if not 0 <= found <= most:
                raise ProtocolError(
                    f"{link.peer} sent {frame.kind.name} of step {frame.step} with {name} {found:g}"
                )
        return found

    def _note(self, what: str, link: Link | None, frame: Frame) -> None:
        """Note a frame for an audit; it came down the chain if it came from upstream."""
        if self._notes is not None:
            self._notes.add(what, frame, down=(link is self.upstream) == (what == TAKEN))

    def _bring(self, frame: Frame) -> Frame:
        return _replace_tensors(frame, bring(frame.tensors, self.place))

    def _blame(self, link: Link) -> Around:
        """Blame errors in the body on the neighbour on a link."""
        return blame(self.settings.name, link, self._find_side(link))

    def _find_side(self, link: Link) -> int:
        return MemberFailed.UPSTREAM if link is self.upstream else MemberFailed.DOWNSTREAM


def _replace_tensors(frame: Frame, tensors: Mapping[str, Tensor]) -> Frame:
    return frame if tensors is frame.tensors else frame.carry(tensors)
