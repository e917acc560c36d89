"""Sending no faster than planned: a bucket that empties at the rate of the link."""

from __future__ import annotations

from dataclasses import dataclass, field

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import QUEUE_FRAMES
from collapipe_flwr.transport.limits import FrameLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How a stream behaves.

    `rate_bit_per_s` paces what this end sends (None: as fast as it goes): a frame leaves when a
    wire of that rate would have carried it. Both ends note frames under `stream_id`
    (`LinkTraffic.note`).
    """

    codec: str = "fp32"
    limits: FrameLimits = field(default_factory=FrameLimits)
    queue_frames: int = QUEUE_FRAMES
    queue_bytes: int = 512 * 2**20
    rate_bit_per_s: float | None = None
    stream_id: int = 0


class RateLimiter:
    """Says how long to hold each message back; the clock is the caller's.

    Messages leave one after the other, each taking its size over the rate, and time in which
    nothing was sent is not saved up.
    """

    def __init__(self, rate_bit_per_s: float | None) -> None:
        if rate_bit_per_s is not None and not rate_bit_per_s > 0:
            raise ConfigError(f"the rate of a link must be > 0 bit/s, got {rate_bit_per_s}")
        self._rate_bit_per_s = rate_bit_per_s
        self._free_s = float("-inf")  # when the wire has carried all earlier messages

    def carrying_s(self, size_bytes: int) -> float:
        """Seconds for which a message of this size keeps the wire busy; 0 without a rate."""
        return 8 * size_bytes / self._rate_bit_per_s if self._rate_bit_per_s else 0.0

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Seconds from now until a message of this size has left."""
        if self._rate_bit_per_s is None:
            return 0.0
        self._free_s = max(self._free_s, now_s) + self.carrying_s(size_bytes)
        return self._free_s - now_s
