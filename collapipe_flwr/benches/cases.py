"""Which cases the bench runs: equal terms on loopback, then links and devices that are slow.

On loopback both sides have the same split, schedule and micro-batches. The peer warms 1F1B up as
the textbook does; ours has the depths that are planned for these stages, and for comparison the
peer's. Where something is slow the peer keeps the even split, and ours is planned as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from collapipe_flwr.benches.job import Job
from collapipe_flwr.benches.model import Shape
from collapipe_flwr.benches.planned import Site, planned_job, with_planned_depths
from collapipe_flwr.transport.quantize import WIRE_CODECS

LOOPBACK, EQUAL = "loopback", "equal"
SLOW_RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s
SLOW_DEVICE = 3.0
_EVEN_4 = (0, 3, 3, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two jobs of one comparison; ``hop_s`` is how long a link carries one micro-batch."""

    link: str
    device: str = EQUAL
    ours: Job
    theirs: Job
    hop_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all cases share."""

    shape: Shape = field(default_factory=Shape)
    schedules: tuple[str, ...] = ("gpipe", "1f1b")
    splits: tuple[tuple[int, ...], ...] = ((3, 3), (4, 2), (2, 2, 2), (1, 3, 2))
    codecs: tuple[str, ...] = ("fp32", "bf16")  # of our side over the slow link


def loopback_cases(terms: Terms, flop_per_s: float) -> list[Case]:
    """The same for both sides, but for the depths of ours."""
    site = Site(flop_per_s=flop_per_s, shape=terms.shape)
    jobs = _jobs(terms, terms.schedules)
    return [Case(link=LOOPBACK, ours=with_planned_depths(site, job), theirs=job) for job in jobs]


def textbook_cases(terms: Terms) -> list[Case]:
    """1F1B over loopback, with the textbook's depths on both sides."""
    return [Case(link=LOOPBACK, ours=job, theirs=job) for job in _jobs(terms, ("1f1b",))]


def slow_device_cases(terms: Terms, flop_per_s: float) -> list[Case]:
    """The second of two devices computes three times as long."""
    slow = (1.0, SLOW_DEVICE)
    site = Site(flop_per_s=flop_per_s, slow=slow, shape=terms.shape)
    peers = _even_peers(terms, (1.0, *slow, 1.0))
    name = f"second device {SLOW_DEVICE:g}x slower"
    return [
        Case(link=LOOPBACK, device=name, ours=planned_job(site, peer), theirs=peer)
        for peer in peers
    ]


def slow_link_cases(terms: Terms, flop_per_s: float) -> list[Case]:
    """Every link carries 100 Mbit/s; the peer's activations are in single precision."""
    cases = []
    for codec in terms.codecs:
        site = Site(
            flop_per_s=flop_per_s,
            rate_bytes_per_s=SLOW_RATE_BYTES_PER_S,
            wire_bytes=4.0 * wire_share(codec),
            shape=terms.shape,
        )
        for peer in _even_peers(terms):
            ours = replace(planned_job(site, peer), codec=codec)
            cases.append(Case(link="100 Mbit/s", ours=ours, theirs=peer, hop_s=site.hop_s))
    return cases


def wire_share(codec: str) -> float:
    """Bytes of a codec over those of single precision, for large tensors."""
    import torch

    elements = 2**20
    return WIRE_CODECS[codec].wire_bytes(elements, torch.float32) / (4 * elements)


def _jobs(terms: Terms, schedules: Sequence[str]) -> list[Job]:
    return [
        Job(schedule=schedule, split=split, shape=terms.shape)
        for split in terms.splits
        for schedule in schedules
    ]


def _even_peers(terms: Terms, slow: Sequence[float] = ()) -> list[Job]:
    return [
        Job(schedule=schedule, split=_EVEN_4, slow=tuple(slow), shape=terms.shape)
        for schedule in terms.schedules
    ]
