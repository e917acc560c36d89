"""The rate of a wire, measured from frames that both of its ends noted.

The sender's notes alone are not enough: its transport takes megabytes at once and sends them later.
So both ends note frames, and a first-in-first-out wire is fitted to the notes of each stream. With
s_k and r_k the times when frame k of b_k bytes left and arrived, the wire was idle before frame k
if

    s_k + o >= r_(k-1),    o = min over k of (r_k - s_k):

o is the difference of the clocks plus the delay of a frame with next to no bytes. A run of frames
that found the wire busy, with the one before them, kept it busy from s_first + o to r_last: x
seconds for B bytes. The time of a run of small frames, h in the median, is overhead of messages
rather than of the wire; at most half of x counts as such overhead:

    rate = median over runs of large frames of 8 B / max(x - h, x / 2).

The median ignores single runs that were delayed. A paced sender notes a frame when it releases it:
the rate is the wire's, not the pace's. Clocks may drift apart by some 50 millionths within a
stream, 5 ms in 100 s. A link that was opened again, for the next replay interval of a round, is
another stream: its frames are counted from 0 again, and o is found anew. A stream that only one end
noted is ignored. Our reconstruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from collapipe_flwr.core.links import Note

_Frame = tuple[float, float, int]  # left, arrived, bytes

SMALL = 1 / 16  # of the largest frame's bytes: as good as none
LARGE = 1 / 2  # from here on a frame tells the rate
FEWEST = 3  # large frames
SHORTEST_S = 1e-6


def measure_bit_per_s(sent: Sequence[Note], arrived: Sequence[Note]) -> float | None:
    """Measure the rate of one link direction; None if too few frames were noted at both ends."""
    streams = _match_streams(sent, arrived)
    most = max((size for frames in streams for _, _, size in frames), default=0)
    telling = [frames for frames in streams if min(size for _, _, size in frames) <= SMALL * most]
    if sum(size >= LARGE * most for frames in telling for _, _, size in frames) < FEWEST:
        return None
    runs = [run for frames in telling for run in _split_runs(frames)]
    small = [busy_s for busy_s, size in runs if size <= SMALL * most]
    overhead_s = median(small) if small else 0.0
    return median(
        8.0 * size / max(busy_s - overhead_s, busy_s / 2, SHORTEST_S)
        for busy_s, size in runs
        if size >= LARGE * most
    )


def _match_streams(sent: Sequence[Note], arrived: Sequence[Note]) -> list[list[_Frame]]:
    """Collect the frames that both ends noted, stream by stream."""
    left = {(stream, frame, size): at_s for stream, frame, at_s, size in sent}
    found: dict[int, list[_Frame]] = {}
    for stream, frame, at_s, size in arrived:
        if (stream, frame, size) in left:
            both = (left[stream, frame, size], at_s, size)
            found.setdefault(stream, []).append(both)
    return list(found.values())


def _split_runs(frames: Sequence[_Frame]) -> list[tuple[float, int]]:
    """Split a stream's frames into runs between idle moments of the wire: busy seconds, bytes."""
    offset_s = min(there - here for here, there, _ in frames)
    runs: list[list[_Frame]] = []
    for frame in frames:
        if runs and frame[0] + offset_s < runs[-1][-1][1]:
            runs[-1].append(frame)
        else:
            runs.append([frame])
    return [(run[-1][1] - (run[0][0] + offset_s), sum(f[2] for f in run)) for run in runs]
