"""One hop of a chain: how its link behaves.

Forward is towards the edge. Rates are bits per second, None where nothing limits them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Codec of hidden states and gradients, and the rates that senders keep to.

    In a plan the rates are those that the planned power and bandwidth reach, None where nobody
    computed them.
    """

    codec: str = "fp32"
    forward_bit_per_s: float | None = None
    backward_bit_per_s: float | None = None

    @property
    def unpaced(self) -> LinkConfig:
        """The same link, whose senders do not hold anything back."""
        return LinkConfig(codec=self.codec)

    def limited(self, codec: str, bit_per_s: float | None) -> LinkConfig:
        """The same link bound to ``codec`` (empty: its own), and to the slower of two rates."""
        return LinkConfig(
            codec=codec or self.codec,
            forward_bit_per_s=slower(self.forward_bit_per_s, bit_per_s),
            backward_bit_per_s=slower(self.backward_bit_per_s, bit_per_s),
        )


def slower(rate: float | None, other: float | None) -> float | None:
    """The smaller of two limits; None is no limit."""
    return min((r for r in (rate, other) if r is not None), default=None)
