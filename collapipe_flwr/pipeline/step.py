"""One optimizer step: its description for all stages, and micro-batches in flight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from collapipe_flwr.core.errors import ConfigError, ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.pipeline.config import MOST_SEED
from collapipe_flwr.pipeline.gradient_sums import ROWS
from collapipe_flwr.pipeline.link import Frame, FrameKind

CLASSES, LOGITS = "classes", "logits"
PREDICTIONS = ("", CLASSES, LOGITS)
_MOST_MICRO_BATCHES = 65536


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

    def __post_init__(self) -> None:
        weighs = self.weight > 0 or (self.weight == 0 and not self.train)  # 0: predictions only
        if not (1 <= self.micro_batches <= _MOST_MICRO_BATCHES and weighs):
            raise ConfigError(
                f"a step cannot have {self.micro_batches} micro-batches of weight {self.weight}"
            )
        if self.predict not in PREDICTIONS:
            raise ConfigError(f"a step cannot predict {self.predict[:20]!r}")
        if not 0 <= self.rate < math.inf:
            raise ConfigError(f"a step cannot multiply the learning rate by {self.rate}")
        if self.seed is not None and not 0 <= self.seed < MOST_SEED:
            raise ConfigError(f"a step cannot have the seed {self.seed}")

    def make_frame(self) -> Frame:
        """Build the BEGIN frame for the next stage."""
        tensors = {ROWS + key: ids for key, ids in self.rows.items()}
        text = to_json(replace(self, rows={}))
        return Frame(kind=FrameKind.BEGIN, step=self.index, tensors=tensors, text=text)

    @staticmethod
    def from_frame(frame: Frame) -> Step:
        """Read a BEGIN frame. Raises ProtocolError for an invalid one."""
        rows = {k.removeprefix(ROWS): t for k, t in frame.tensors.items() if k.startswith(ROWS)}
        if any(ids.dim() != 1 or ids.dtype != torch.int64 for ids in rows.values()):
            raise ProtocolError("a BEGIN frame asks for rows by something else than their ids")
        return replace(from_json(Step, frame.text, "a BEGIN frame"), index=frame.step, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one micro-batch: `inputs` for the embedding, `context` for all stages.

    Of the context, only head and loss read `targets`, such as labels.

    `weight` is n_i, the number of examples or target tokens (or the sum of their weights) that the
    loss of this micro-batch is a mean over (0 is allowed); the last stage checks it.
    """

    inputs: Mapping[str, Tensor]
    context: Mapping[str, Tensor]
    weight: float
    targets: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class InFlight:
    """One micro-batch between its forward and its backward."""

    frame: Frame  # the input, without the hidden state; scalars: scale n_i / N, weight n_i
    hidden: Tensor | None  # the input whose gradient goes upstream; the first stage has none
    end: GradientEdge | None  # where the graph of the output ends, which itself may be freed
    shape: torch.Size  # of the output


def find_end(output: Tensor) -> GradientEdge | None:
    """Return where the backward pass of an output begins; None if nothing there is trained."""
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
