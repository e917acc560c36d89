"""How the stages of one run compute and send: choices that all of them must share."""

from __future__ import annotations

from dataclasses import dataclass

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import at_least, key, one_of

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a run asks of every stage, besides its schedule.

    ``precision`` bf16 computes matrix products in bfloat16 (torch's autocast) on weights, gradients
    and optimiser state that stay in single precision. ``recompute`` makes devices compute the
    forward pass again instead of keeping it. ``clip_norm`` bounds the norm of all gradients
    together (0: not at all). ``codec`` is that of hidden states and gradients on links for which
    the plan chose none. ``paced`` makes senders keep to the planned rates.
    ``keep_spans`` keeps what every stage did when.
    """

    precision: str = key("fp32", one_of(*PRECISIONS))
    recompute: bool = key(False)
    clip_norm: float = key(0.0, at_least(0))
    codec: str = "fp32"
    keep_spans: bool = key(False, name="timeline")
    paced: bool = False

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if not self.clip_norm >= 0:
            raise ConfigError(f"clip norm must be >= 0, got {self.clip_norm}")


def check_precision(precision: str) -> None:
    """Raise ConfigError for one that stages cannot compute in."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
