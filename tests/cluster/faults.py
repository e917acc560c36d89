"""A device that dies at a chosen point: step, device and phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from collapipe_flwr.pipeline.roles import MiddleStage

PHASES = ("begin", "forward", "send", "backward", "apply", "applied")


class PowerCut(BaseException):
    """The device is gone; nothing of ours raises this."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Device ``device_id`` dies in ``phase`` of step ``step``, once, at its second micro-batch.

    ``begin`` is before anything of the step, ``apply`` just before and ``applied`` just after its
    optimiser moved the weights.
    """

    step: int
    device_id: str
    phase: str


def failing(*faults: Fault, die: Callable[[], None] | None = None) -> Callable[..., MiddleStage]:
    """A maker of stages, some of which die; each fault strikes once."""
    left = list(faults)

    class FailingStage(MiddleStage):
        def run_step(self, step):
            self._at(step.index, "begin")
            super().run_step(step)
            self._at(step.index, "applied")

        def _compute(self, frame, hidden):
            if frame.micro_batch == 1:
                self._at(frame.step, "forward")
            return super()._compute(frame, hidden)

        def _emit(self, frame, output):
            super()._emit(frame, output)
            if frame.micro_batch == 1:
                self._at(frame.step, "send")

        def _backward(self, step, micro_batch):
            if micro_batch == 1:
                self._at(step.index, "backward")
            super()._backward(step, micro_batch)

        def _apply(self, step):
            self._at(step.index, "apply")
            super()._apply(step)

        def _at(self, step: int, phase: str) -> None:
            for fault in tuple(left):
                if fault == Fault(step=step, device_id=self.settings.name, phase=phase):
                    left.remove(fault)
                    if die is None:
                        raise PowerCut(f"{phase} of step {step}")
                    die()

    return FailingStage
