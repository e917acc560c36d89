"""Sending no faster than planned: a bucket that empties at the rate of the link."""

from __future__ import annotations

from dataclasses import dataclass, field

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.transport.limits import FrameLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """How a stream behaves.

    `rate_bytes_per_s` paces what this end sends (None: as fast as it goes): a frame leaves when
    a wire of that rate would have carried it. `peer_rate_bytes_per_s` is what the other end is
    asked to keep to (None: the same rate). Both ends note frames under `stream_id` (`FrameLog`).
    """

    codec: str = "fp32"
    limits: FrameLimits = field(default_factory=FrameLimits)
    queue_frames: int = 64
    queue_bytes: int = 512 * 2**20
    rate_bytes_per_s: float | None = None
    peer_rate_bytes_per_s: float | None = None
    stream_id: int = 0

    @property
    def peer_rate(self) -> float | None:
        """Bytes per second of the other end."""
        return self.peer_rate_bytes_per_s or self.rate_bytes_per_s


def slower(rate: float | None, other: float | None) -> float | None:
    """The smaller of two limits; None is no limit."""
    return min((r for r in (rate, other) if r is not None), default=None)


class RateLimiter:
    """Says how long to hold each message back; the clock is the caller's.

    Messages leave one after the other, each taking its size over the rate, and time in which
    nothing was sent is not saved up.
    """

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
            raise ConfigError(f"the rate of a link must be > 0 bytes/s, got {rate_bytes_per_s}")
        self._rate_bytes_per_s = rate_bytes_per_s
        self._free_s = float("-inf")  # when the wire has carried all earlier messages

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Seconds from now until a message of this size has left."""
        if self._rate_bytes_per_s is None:
            return 0.0
        self._free_s = max(self._free_s, now_s) + size_bytes / self._rate_bytes_per_s
        return self._free_s - now_s
