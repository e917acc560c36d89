"""What both runtimes are asked to run, as a value that travels to their processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.data_plane.model import BenchPart, Shape

TOKEN = "a session of a bench on this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One way to train: ``split`` is blocks per stage, ``depths`` micro-batches in flight.

    ``slow`` is how many times longer each stage computes than this machine; ``codec`` and
    ``recompute`` are those of our runtime alone.
    """

    schedule: str
    split: tuple[int, ...]
    depths: tuple[int, ...] = ()
    slow: tuple[float, ...] = ()
    codec: str = "fp32"
    recompute: bool = False
    shape: Shape = field(default_factory=Shape)

    @property
    def stages(self) -> int:
        """Processes of the chain."""
        return len(self.split)

    @property
    def planned_depths(self) -> tuple[int, ...]:
        """Those given, else all under GPipe, and one more per stage from the end under 1F1B."""
        if self.schedule == "gpipe":
            return (self.shape.micro_batches,) * self.stages
        return self.depths or tuple(self.stages - k for k in range(self.stages))

    def part(self, stage: int) -> BenchPart:
        """The part of one stage with its first weights."""
        return BenchPart(self.shape, self.split, stage, self.slow[stage] if self.slow else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOrder:
    """A job and the place of one process in it: the specification that a session is opened with."""

    job: Job
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Some steps in a row: wall seconds on the first stage, and the loss of the last step."""

    wall_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """One stage in one step: means of a micro-batch, and the optimiser.

    ``weights_s`` is what a backward pass does after its gradient was sent.
    """

    forward_s: float
    backward_s: float
    weights_s: float
    optimizer_s: float

    @property
    def pass_s(self) -> float:
        """All that a micro-batch takes here."""
        return self.forward_s + self.backward_s + self.weights_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """One step of our runtime as its stages measured it."""

    step_s: float
    stages: tuple[StageSeconds, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process has used since it began."""

    cpu_s: float
    peak_bytes: int
