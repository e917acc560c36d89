"""One optimiser step as all stages see it, and the frame that announces it."""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.pipeline.frame import Frame, FrameKind

_STEP_SCALARS = ("micro_batches", "train", "weight", "settle")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all stages know about the step in progress; `weight` is N of the whole batch.

    With `settle` the stages add up their gradient norms before anyone applies the step.
    """

    index: int
    micro_batches: int
    train: bool
    weight: float
    settle: bool = False

    def frame(self) -> Frame:
        """The BEGIN frame that tells the next stage."""
        scalars = {
            "micro_batches": float(self.micro_batches),
            "train": float(self.train),
            "weight": self.weight,
            "settle": float(self.settle),
        }
        return Frame(kind=FrameKind.BEGIN, step=self.index, scalars=scalars)

    @staticmethod
    def of(frame: Frame, most_micro_batches: int = 65536) -> Step:
        """Read a BEGIN frame. Raises ProtocolError when it makes no sense."""
        try:
            count, train, weight, settle = (frame.scalars[k] for k in _STEP_SCALARS)
        except KeyError as error:
            raise ProtocolError(f"a BEGIN frame lacks the scalar {error}") from error
        if not (1 <= count <= most_micro_batches and count == int(count) and weight > 0):
            raise ProtocolError(f"a BEGIN frame with {count} micro-batches of weight {weight}")
        return Step(
            index=frame.step,
            micro_batches=int(count),
            train=bool(train),
            weight=weight,
            settle=bool(settle),
        )
