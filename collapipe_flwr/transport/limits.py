"""What a receiver accepts from a stranger."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """Bounds on one frame, checked before anything is allocated."""

    frame_bytes: int = 256 * 2**20
    header_bytes: int = 256 * 2**10
    tensors: int = 64
    dimensions: int = 8
