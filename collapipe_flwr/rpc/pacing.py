"""Sending no faster than planned: a bucket that empties at the rate of the link."""

from __future__ import annotations

from collapipe_flwr.core.errors import ConfigError


class Pacer:
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
