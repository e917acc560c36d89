"""One optimizer step: its description for all stages, and micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.pipeline.config import MOST_SEED
from collapipe_flwr.pipeline.gradient_sums import ROWS
from collapipe_flwr.pipeline.link import Frame, FrameKind

_PREDICT = "guesses"  # on the wire
_RATE = "rate"  # on the wire; 1 where it is missing
CLASSES, LOGITS = "classes", "logits"
PREDICTIONS = ("", CLASSES, LOGITS)  # the place is the number on the wire
_MOST_MICRO_BATCHES = 65536
_STEP_SCALARS = ("micro_batches", "train", "weight", "settle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step in progress, as known to all stages; `weight` is N of the whole batch.

    With `settle` the stages sum their gradient norms, and the gradients of shared parameters,
    before any of them applies the step. In an evaluation the last stage also returns the best
    classes, or all logits, if `predict` says so (`PREDICTIONS`). All learning rates are multiplied
    by `rate`.
    """

    index: int
    micro_batches: int
    train: bool
    weight: float
    settle: bool = False
    predict: str = ""
    rate: float = 1.0
    seed: int | None = None  # of all random operations; None: unseeded
    rows: Mapping[str, Tensor] = field(default_factory=dict)  # ids of borrowed rows, by table

    def frame(self) -> Frame:
        """The BEGIN frame for the next stage."""
        scalars = {
            "micro_batches": float(self.micro_batches),
            "train": float(self.train),
            "weight": self.weight,
            "settle": float(self.settle),
            _PREDICT: float(PREDICTIONS.index(self.predict)),
        }
        if self.rate != 1.0:
            scalars[_RATE] = self.rate
        if self.seed is not None:
            scalars["seed"] = float(self.seed)
        tensors = {ROWS + key: ids for key, ids in self.rows.items()}
        return Frame(kind=FrameKind.BEGIN, step=self.index, tensors=tensors, scalars=scalars)

    @staticmethod
    def of(frame: Frame) -> Step:
        """Read a BEGIN frame. Raises ProtocolError for an invalid one."""
        try:
            count, train, weight, settle = (frame.scalars[k] for k in _STEP_SCALARS)
        except KeyError as error:
            raise ProtocolError(f"a BEGIN frame lacks the scalar {error}") from error
        weighs = weight > 0 or (weight == 0 and not train)  # 0: predictions only
        if not (1 <= count <= _MOST_MICRO_BATCHES and count == int(count) and weighs):
            raise ProtocolError(f"a BEGIN frame with {count} micro-batches of weight {weight}")
        rate = frame.scalars.get(_RATE, 1.0)
        if not 0 <= rate < math.inf:
            raise ProtocolError(f"a BEGIN frame with the learning rate times {rate}")
        return Step(
            index=frame.step,
            micro_batches=int(count),
            train=bool(train),
            weight=weight,
            settle=bool(settle),
            predict=_prediction(frame),
            rate=rate,
            seed=_seed(frame),
            rows=_row_ids(frame),
        )


def _prediction(frame: Frame) -> str:
    number = frame.scalars.get(_PREDICT, 0.0)
    if number not in range(len(PREDICTIONS)):
        raise ProtocolError(f"a BEGIN frame asks for predictions of the kind {number:g}")
    return PREDICTIONS[int(number)]


def _seed(frame: Frame) -> int | None:
    seed = frame.scalars.get("seed")
    if seed is None:
        return None
    if not 0 <= seed < MOST_SEED or seed != int(seed):
        raise ProtocolError(f"a BEGIN frame with the seed {seed}")
    return int(seed)


def _row_ids(frame: Frame) -> dict[str, Tensor]:
    found = {k.removeprefix(ROWS): t for k, t in frame.tensors.items() if k.startswith(ROWS)}
    if any(ids.dim() != 1 or ids.dtype != torch.int64 for ids in found.values()):
        raise ProtocolError("a BEGIN frame asks for rows by something else than their ids")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one micro-batch: `inputs` for the embedding, `context` for all stages.

    `weight` is n_i, the number of examples or target tokens (or the sum of their weights) that the
    loss of this micro-batch is a mean over (0 is allowed); the last stage checks it.
    """

    inputs: Mapping[str, Tensor]
    context: Mapping[str, Tensor]
    weight: float


@dataclass(slots=True, kw_only=True)
class InFlight:
    """One micro-batch between its forward and its backward."""

    frame: Frame  # the input, without the hidden state; scalars: scale n_i / N, weight n_i
    hidden: Tensor | None  # the input whose gradient goes upstream; the first stage has none
    end: GradientEdge | None  # where the graph of the output ends, which itself may be freed
    shape: torch.Size  # of the output


def end_of(output: Tensor) -> GradientEdge | None:
    """Where the backward pass of an output begins; None if nothing behind it is trained."""
    return get_gradient_edge(output) if output.requires_grad else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Mean loss over the whole batch, and the weight it is a mean over; 0 over nothing.

    With clipping `gradient_norm` is that of all stages together before it; `predictions` are those
    of the last stage, by micro-batch.
    """

    loss: float
    weight: float
    gradient_norm: float | None = None
    predictions: tuple[Tensor, ...] = ()
