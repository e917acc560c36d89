"""How one stage runs, wherever it stands in the chain."""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.pipeline.execution import check_precision
from collapipe_flwr.pipeline.step import MOST_SEED


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """`deadline_s` bounds each wait inside a step, `pause_s` between steps or texts.

    `recompute` keeps only the inputs of the blocks for a micro-batch in flight, or just its own
    input where the part does not know its blocks, and computes them again for the backward. `seed`
    makes dropout independent of the cut (`randomness`); that of the first stage holds for the whole
    chain, and it should change from round to round. `precision` as in `execution`. `clip_norm`
    counts on the first stage alone, which tells the others.
    """

    name: str
    schedule: str = "gpipe"
    depth: int = 1
    deadline_s: float = 60.0
    idle_s: float = 600.0
    keep_spans: bool = False
    recompute: bool = False
    seed: int | None = None
    precision: str = "fp32"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if self.seed is not None and not 0 <= self.seed < MOST_SEED:
            raise ConfigError(f"a seed must be >= 0 and below 2**53, got {self.seed}")

    @property
    def pause_s(self) -> float:
        """`idle_s`, but not less than `deadline_s`: stages ahead may still be at the last step."""
        return max(self.idle_s, self.deadline_s)
