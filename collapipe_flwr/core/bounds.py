"""Types for the fields of messages, which bound the values that another machine may send.

A field of one of these types is a plain float, int, str or tuple. The codec (`json_codec`) refuses
all other values when a message arrives, so that no later code has to. The largest numbers are far
beyond every machine's, and far below those whose products and sums overflow.
"""

from __future__ import annotations

import math
from typing import Annotated

from collapipe_flwr.core.keys import Rule, between, matches

MOST_SECONDS = 1e9  # 30 years


def most_entries(count: int) -> Rule:
    """Accept lists, and mappings, with so many entries at most."""
    return Rule(lambda v: len(v) <= count, f"must have at most {count} entries")


def text(most: int, *, least: int = 0) -> Rule:
    """Accept one line of printable characters."""
    return Rule(
        lambda v: least <= len(v) <= most and v.isprintable(),
        f"must be one line of {least} to {most} printable characters",
    )


LEAST_SPEED, MOST_SPEED = 1.0, 1e24
_MOST_NUMBER = 1e30  # of a loss or a norm

MEMBER_NAME = matches(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}",
    "must be a name of letters, digits, dots and dashes, 63 at most",
)
MemberName = Annotated[str, MEMBER_NAME]
NAME = text(200, least=1)
Name = Annotated[str, NAME]  # of a cluster, or of a device, which begins with it
Text = Annotated[str, text(200)]
Address = Annotated[str, text(300)]
Sentence = Annotated[str, text(2000)]

Count = Annotated[int, between(0, 2**40)]  # of examples, steps
Claim = Annotated[int, between(0, 2**63)]  # of examples, which the server may reduce
Examples = Annotated[int, between(1, 2**40)]
Bytes = Annotated[int, between(0, 2**53)]
Several = Annotated[int, between(1, 2**31)]
Labels = Annotated[float, between(0, 1e30)]  # sums of weights, or of their squares
Seconds = Annotated[float, between(0, MOST_SECONDS)]
Overhead = Annotated[float, between(0, 1e6)]  # seconds of every block or round
SpeedOrNone = Annotated[  # 0 where it was not measured
    float,
    Rule(
        lambda v: v == 0 or LEAST_SPEED <= v <= MOST_SPEED,
        f"must be 0, or lie between {LEAST_SPEED:g} and {MOST_SPEED:g}",
    ),
]
Signed = Annotated[float, between(-1e12, 1e12)]
Moment = Annotated[float, between(-1e12, 1e12)]  # by anybody's clock
Speed = Annotated[float, between(LEAST_SPEED, MOST_SPEED)]  # FLOP/s
Rate = Annotated[float, between(1.0, 1e18)]  # bit/s
Bandwidth = Annotated[float, between(1.0, 1e15)]  # Hz
Work = Annotated[float, between(1.0, 1e15)]  # FLOP
Duration = Annotated[float, between(1e-9, 1e6)]  # seconds
Watts = Annotated[float, between(1e-9, 1e6)]  # of a radio
Share = Annotated[float, between(0, 1)]
Joules = Annotated[float, between(0, 1e15)]
JoulesPerFlop = Annotated[float, between(0, 1.0)]
MaybeHuge = Annotated[  # a loss or a norm, which may diverge: to infinity, or to NaN
    float,
    Rule(
        lambda v: math.isnan(v) or v == math.inf or abs(v) <= _MOST_NUMBER,
        f"must lie between {-_MOST_NUMBER:g} and {_MOST_NUMBER:g}, or be infinite or NaN",
    ),
]
