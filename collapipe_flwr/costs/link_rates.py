"""What a link could carry, from when frames left and when they arrived, by two clocks.

The sender's side alone cannot tell: its transport takes megabytes at once and sends them later. So
both ends note frames, and a first-in-first-out wire is laid through the notes. With s_k and r_k
when frame k of b_k bytes left and arrived, it was on the wire for

    x_k = r_k - max(s_k + o, r_(k-1)),    o = min over k of (r_k - s_k),

because it began when it was sent or when the frame before had passed. o is the difference of the
clocks plus the delay of a frame with next to no bytes; every step sends such frames both ways. What
small frames cost besides, h, their median x, is overhead of messages and no time of the wire, as
far as it is not most of x_k:

    rate = median over large k of 8 b_k / max(x_k - h, x_k / 2).

The median is untouched by single frames that were held up. A sender that kept to a pace notes a
frame when it let it go: the rate is the wire's, not the pace's. Our reconstruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

Note = tuple[int, float, int]
"""Which frame of its direction, when (seconds by the own clock), bytes."""

SMALL = 1 / 16  # of the largest frame's bytes: as good as none
LARGE = 1 / 2  # from here on a frame tells the rate
FEWEST = 4  # frames of either kind
SHORTEST_S = 1e-6


def carried_bit_per_s(sent: Sequence[Note], arrived: Sequence[Note]) -> float | None:
    """The rate of one direction of a link; None where too few frames were noted at both ends."""
    frames = list(_on_wire(sent, arrived))
    largest = max((size for size, _ in frames), default=0)
    small = [x for size, x in frames if size <= SMALL * largest]
    large = [(size, x) for size, x in frames if size >= LARGE * largest]
    if min(len(small), len(large)) < FEWEST:
        return None
    overhead_s = median(small)
    return median(8.0 * size / max(x - overhead_s, x / 2, SHORTEST_S) for size, x in large)


def _on_wire(sent: Sequence[Note], arrived: Sequence[Note]) -> Iterator[tuple[int, float]]:
    """Bytes and seconds on the wire of every frame that both ends noted."""
    left = {(index, size): at_s for index, at_s, size in sent}
    pairs = [(left[i, size], at_s, size) for i, at_s, size in arrived if (i, size) in left]
    offset_s = min((there - here for here, there, _ in pairs), default=0.0)
    before_s = float("-inf")
    for here, there, size in pairs:
        yield size, there - max(here + offset_s, before_s)
        before_s = there
