"""One optimiser step as all stages see it, and the frame that announces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.pipeline.config import MOST_SEED
from collapipe_flwr.pipeline.link import Frame, FrameKind
from collapipe_flwr.pipeline.ties import ids_as_tensors, ids_of

_STEP_SCALARS = ("micro_batches", "train", "weight", "settle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all stages know about the step in progress; `weight` is N of the whole batch.

    With `settle` the stages add up their gradient norms, and the gradients of what they share,
    before anyone applies the step. With `guesses`, in an evaluation, the last stage also tells
    what it holds for best.
    """

    index: int
    micro_batches: int
    train: bool
    weight: float
    settle: bool = False
    guesses: bool = False
    seed: int | None = None  # of all random operations; None leaves them to chance
    rows: Mapping[str, Tensor] = field(default_factory=dict)  # ids of borrowed rows, by table

    def frame(self) -> Frame:
        """The BEGIN frame that tells the next stage."""
        scalars = {
            "micro_batches": float(self.micro_batches),
            "train": float(self.train),
            "weight": self.weight,
            "settle": float(self.settle),
            "guesses": float(self.guesses),
        }
        if self.seed is not None:
            scalars["seed"] = float(self.seed)
        tensors = ids_as_tensors(self.rows)
        return Frame(kind=FrameKind.BEGIN, step=self.index, tensors=tensors, scalars=scalars)

    @staticmethod
    def of(frame: Frame, most_micro_batches: int = 65536) -> Step:
        """Read a BEGIN frame. Raises ProtocolError when it makes no sense."""
        try:
            count, train, weight, settle = (frame.scalars[k] for k in _STEP_SCALARS)
        except KeyError as error:
            raise ProtocolError(f"a BEGIN frame lacks the scalar {error}") from error
        weighs = weight > 0 or (weight == 0 and not train)  # without labels there are only guesses
        if not (1 <= count <= most_micro_batches and count == int(count) and weighs):
            raise ProtocolError(f"a BEGIN frame with {count} micro-batches of weight {weight}")
        return Step(
            index=frame.step,
            micro_batches=int(count),
            train=bool(train),
            weight=weight,
            settle=bool(settle),
            guesses=bool(frame.scalars.get("guesses", 0.0)),
            seed=_seed(frame),
            rows=ids_of(frame.tensors),
        )


def _seed(frame: Frame) -> int | None:
    seed = frame.scalars.get("seed")
    if seed is None:
        return None
    if not 0 <= seed < MOST_SEED or seed != int(seed):
        raise ProtocolError(f"a BEGIN frame with the seed {seed}")
    return int(seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Input of one micro-batch: `inputs` feed the embedding, `context` travels to all stages.

    `weight` is n_i, the number of examples or target tokens that the loss of this micro-batch is
    a mean over (0 is allowed); the last stage counts them again and refuses a wrong number.
    """

    inputs: Mapping[str, Tensor]
    context: Mapping[str, Tensor]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Mean loss over the whole batch, and the weight it is a mean over; 0 over nothing.

    `gradient_norm` is that of all stages together before clipping, where it was asked for, and
    `guesses` what the last stage holds for best, by micro-batch.
    """

    loss: float
    weight: float
    gradient_norm: float | None = None
    guesses: tuple[Tensor, ...] = ()
