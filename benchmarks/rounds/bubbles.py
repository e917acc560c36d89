"""Where the seconds of a pipeline go, stage by stage: work, frames, and bubbles by their causes.

A bubble is what a stage waits. What it waits for is known from the timelines of its neighbours,
which have the same clock here. The message that ends it was encoded by the neighbour, then on its
wire (behind those that were sent before), then decoded. As long as the neighbour has not begun to
send it, the cause is

* filling: no forward pass of this step has been done here yet,
* upstream: the stage ahead has not computed the next activation,
* gradient: the stage behind has not computed the next gradient,
* draining: all passes of this step are done here, but not in the stages ahead.

The first stage begins and ends the steps of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from collapipe_flwr.core.measurements import Span

PASSES, OPTIMIZER, LOOP, FRAMES = "passes", "optimizer", "stage loop", "frames and gRPC"
FILLING, UPSTREAM, GRADIENT, LINK, DRAINING = BUBBLES = (
    "bubble: filling",
    "bubble: slower upstream",
    "bubble: gradient from downstream",
    "bubble: link",
    "bubble: draining",
)
FORWARD = ("forward", "test")
_WORK = {
    **dict.fromkeys((*FORWARD, "backward", "weights"), PASSES),
    "optimizer": OPTIMIZER,
    "send": FRAMES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One replica of a stage; ``down_s`` and ``up_s`` are what a frame keeps its wire busy."""

    name: str
    spans: Sequence[Span]
    down_s: float = 0.0
    up_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Flight:
    """When a message's encoding began and ended, and when it was through the wire."""

    begin_s: float
    encoded_s: float
    through_s: float


_Key = tuple[int, str, int, int]  # place of the sender, pass, step, micro-batch


def split_pipeline(chain: Sequence[Sequence[Member]]) -> dict[str, dict[str, float]]:
    """Seconds by part for every member of ``chain``: stages in order, each with its replicas.

    Parts of a member sum to the time from the first stage's first span to its last.
    """
    flights: dict[_Key, _Flight] = {}
    for place, stage in enumerate(chain):
        for member in stage:
            lanes = [len(chain[i]) if 0 <= i < len(chain) else 1 for i in (place - 1, place + 1)]
            flights |= _list_flights(member, place, lanes)
    driver = _ordered(chain[0][0])
    ends = {span.step: span.stop_s for span in driver}
    whole = driver[0].start_s, driver[-1].stop_s
    return {
        member.name: _split(_ordered(member), place, flights, ends, whole)
        for place, stage in enumerate(chain)
        for member in stage
    }


def _ordered(member: Member) -> list[Span]:
    return sorted(member.spans, key=lambda span: (span.start_s, span.stop_s))


def _list_flights(
    member: Member, place: int, lanes: Sequence[int]
) -> Iterator[tuple[_Key, _Flight]]:
    """What is sent after a forward pass goes down, what after a backward pass goes up."""
    free_s = defaultdict[tuple[str, int], float](float)  # of the wires, by direction and receiver
    for before, span in pairwise(_ordered(member)):
        if span.work != "send" or before.work not in (*FORWARD, "backward"):
            continue
        down = before.work in FORWARD
        lane = before.work, span.micro_batch % lanes[down]
        through_s = max(span.stop_s, free_s[lane]) + (member.down_s if down else member.up_s)
        free_s[lane] = through_s
        key = place, before.work, span.step, span.micro_batch
        yield key, _Flight(span.start_s, span.stop_s, through_s)


def _split(
    spans: Sequence[Span],
    place: int,
    flights: Mapping[_Key, _Flight],
    ends: Mapping[int, float],
    whole: tuple[float, float],
) -> dict[str, float]:
    parts = dict.fromkeys((PASSES, OPTIMIZER, LOOP, FRAMES, *BUBBLES), 0.0)

    def cut(start_s: float, stop_s: float, *pieces: tuple[str, float]) -> None:
        """Add each piece until its end, and what is left to the last of them."""
        for number, (part, until_s) in enumerate(pieces, start=1):
            last = number == len(pieces)
            end_s = stop_s if last else min(max(until_s, start_s), stop_s)
            parts[part] += end_s - start_s
            start_s = end_s

    at_s, step, done = whole[0], -1, set[str]()
    for number, span in enumerate(spans):
        follows = spans[number + 1] if number + 1 < len(spans) else span
        if span.step == step or not place:
            cut(at_s, span.start_s, (LOOP, span.start_s))
        else:  # waiting for the order
            cut(at_s, span.start_s, (DRAINING, ends.get(step, at_s)), (FILLING, span.start_s))
        if span.step != step:
            step, done = span.step, set()
        at_s = span.stop_s
        if span.work != "receive":
            done.add(span.work)
            cut(span.start_s, at_s, (_WORK[span.work], at_s))
            continue
        cause, sender = DRAINING, place
        if done.isdisjoint(FORWARD):
            cause, sender = FILLING, place - 1
        elif follows.work in FORWARD:
            cause, sender = UPSTREAM, place - 1
        elif follows.work == "backward":
            cause, sender = GRADIENT, place + 1
        flight = flights.get((sender, follows.work, span.step, span.micro_batch))
        if flight is None:
            cut(span.start_s, at_s, (cause, at_s))
        else:
            cut(
                span.start_s,
                at_s,
                (cause, flight.begin_s),
                (FRAMES, flight.encoded_s),
                (LINK, flight.through_s),
                (FRAMES, at_s),
            )
    cut(at_s, whole[1], (DRAINING, whole[1]))
    return parts
