"""How the stages of a run compute and send, and how one of them runs.

Both classes are carried whole from where a round is composed to the stage that obeys them: by
reference within a process, as JSON in a `SessionRequest`. A new option needs a field here, the code
that obeys it and its documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import at_least, key, one_of
from collapipe_flwr.pipeline.step import MOST_SEED

PRECISIONS = ("fp32", "bf16")
LONGEST_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a run asks of every stage, besides its schedule.

    ``precision`` bf16 computes matrix products in bfloat16 (torch's autocast) on weights, gradients
    and optimiser state that stay in single precision. ``recompute`` makes devices keep only the
    inputs of their blocks for a micro-batch in flight (or just the input of a part that does not
    know its blocks) and compute the forward pass again for the backward. ``clip_norm`` bounds the
    norm of all gradients together (0: not at all); it counts on the first stage, which tells the
    others. ``codec`` is that of hidden states and gradients on links for which the plan chose none.
    ``paced`` makes senders keep to the planned rates. ``keep_spans`` records what every stage did
    when.
    """

    precision: str = key("fp32", one_of(*PRECISIONS))
    recompute: bool = key(False)
    clip_norm: float = key(0.0, at_least(0))
    codec: str = "fp32"
    keep_spans: bool = key(False, name="timeline")
    paced: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(
                f"precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )
        if not self.clip_norm >= 0:
            raise ConfigError(f"clip norm must be >= 0, got {self.clip_norm}")

    @property
    def without_recompute(self) -> Execution:
        """The same for the first and the last stage, which keep what they computed."""
        return replace(self, recompute=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """How one stage runs, wherever it stands in the chain.

    `depth` is the number of micro-batches in flight before the first backward pass. `deadline_s`
    bounds each wait inside a step, `pause_s` those between steps or texts. `seed` makes dropout
    independent of the cut (`randomness`); that of the first stage holds for the whole chain, and it
    should change from round to round.
    """

    name: str
    schedule: str = "gpipe"
    depth: int = 1
    deadline_s: float = 60.0
    idle_s: float = 600.0
    seed: int | None = None
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < MOST_SEED:
            raise ConfigError(f"a seed must be >= 0 and below 2**53, got {self.seed}")
        if not all(0 < seconds <= LONGEST_WAIT_S for seconds in (self.deadline_s, self.idle_s)):
            raise ConfigError(
                f"deadlines of a stage must be > 0 and <= {LONGEST_WAIT_S:g} s, got "
                f"{self.deadline_s} and {self.idle_s}"
            )

    @property
    def pause_s(self) -> float:
        """`idle_s`, but not less than `deadline_s`: stages ahead may still be at the last step."""
        return max(self.idle_s, self.deadline_s)
