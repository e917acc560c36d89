"""How long the weights and the steps of a round take where devices begin and end it one by one.

The control unit sends the first device its segment, then all others theirs at once, and a device
works as soon as it has its own. In the last step it collects those of the last stage first. Its
radio does one thing at a time, or shares its seconds: a micro-batch's activations and gradients go
before weights, except those of the first device. With out_j and back_j seconds of the weights of
device j, h and g those of a payload over the first hop, there and back, d the micro-batches in
flight at the control unit, H steps of T seconds, and o those of all optimisers,

    r_1 = out_1,    r = out_1 + ... + out_K + d h          device 1, and all, have their weights,
    A = the end of the first step, if the control unit and device 1 begin at r_1, others at r,
    f_k = the end of the last pass of stage k in the last step,
    c_k = max(c_(k+1), f_k + o) + back_k                   the control unit has them again,
    B = max(c_1 + d g, T + o),

and all this takes A + (H - 2) T + B, and H - 1 times o; with one step, B of the step that A is of.
The real thing takes no longer, unless what is earlier for it overtakes something on a half-duplex
link or on one of several replicas. The control unit sends at most d activations before a gradient
is back, and none is back before the last device has its weights; where the last stage has replicas
one may be, and h counts for all micro-batches. After the last stage's last pass at most d gradients
are on their way. Every stage is collected as if all optimisers had taken their time before, so o
only shifts the end: it is left out here, and added by the caller for every step. No step may settle
anything over all stages (clipping, tied parameters): a device would end with the control unit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from collapipe_flwr.core.replay import StepTimes, Trace, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTimes:
    """Seconds of weights, at full power."""

    out_s: Sequence[float]  # to every device, replicas next to each other
    back_s: Sequence[float]  # from the first device of every segment


def overlapped_s(
    times: StepTimes, depths: Sequence[int], micro_batches: int, steps: float, weights: WeightTimes
) -> float:
    """Seconds from the first weight sent to the last one back, without optimisers.

    ``steps`` is H; raises ScheduleError where the depths block.
    """
    held = min(depths[0], micro_batches)
    begun = replace(times, ready_s=_ready_s(times, held, micro_batches, weights.out_s))
    first = replay(begun, depths, micro_batches)
    if steps < 2:
        return _collected_s(first, times, held, weights.back_s)
    step = replay(times, depths, micro_batches)
    between_s = (steps - 2) * step.makespan_s
    return first.makespan_s + between_s + _collected_s(step, times, held, weights.back_s)


def _ready_s(
    times: StepTimes, held: int, micro_batches: int, out_s: Sequence[float]
) -> tuple[float, ...]:
    """Of every worker; the edge waits for nothing."""
    sent = held if max(times.replicas[-2:], default=1) == 1 else micro_batches
    first = times.replicas[1] if times.replicas else 1
    first_s, all_s = sum(out_s[:first]), sum(out_s) + sent * times.hop_s[0][0]
    return (first_s, *(first_s,) * first, *(all_s,) * (len(out_s) - first), 0.0)


def _collected_s(trace: Trace, times: StepTimes, held: int, back_s: Sequence[float]) -> float:
    """When the control unit has all weights of a step that was played."""
    ended_s: defaultdict[str, float] = defaultdict(float)
    for span in trace.spans:
        name, _, _ = span.resource.partition(".")  # of any replica
        ended_s[name] = max(ended_s[name], span.end_s)
    now_s = 0.0
    for stage in range(len(back_s), 0, -1):
        now_s = max(now_s, ended_s[f"stage {stage}"]) + back_s[stage - 1]
    if ended_s[f"stage {len(back_s)}"] < trace.makespan_s:  # gradients make it wait
        now_s += held * times.hop_s[1][0]
    return max(now_s, trace.makespan_s)
