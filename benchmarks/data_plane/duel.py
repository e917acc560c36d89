"""One case of the benchmark: both runtimes train the same model side by side, a few steps in turn.

Turns during which the host of a virtual machine took processor time away are repeated.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from statistics import fmean, median, quantiles

from benchmarks.data_plane.crew import BenchError, Crew
from benchmarks.data_plane.job import Job, StepSeconds, Turn
from benchmarks.data_plane.network import Network
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.replay import StepTimes, replay

SAME_LOSS = 1e-3  # relative: both trained the same model on the same batch
QUIET = 0.02  # of the processors' time
_COUNTERS, _STOLEN_COLUMN = Path("/proc/stat"), 8


class Stolen:
    """The share of the processors' time that was taken away, from one look to the next."""

    def __init__(self) -> None:
        self._seen = (time.monotonic(), _stolen_s())

    def share(self) -> float:
        """Since the last look; 0 on systems that do not count it."""
        then, self._seen = self._seen, (time.monotonic(), _stolen_s())
        wall_s = max(self._seen[0] - then[0], 1e-9)
        return (self._seen[1] - then[1]) / (wall_s * (os.cpu_count() or 1))


def quietest(shares: Sequence[float], count: int) -> list[int]:
    """The ``count`` turns of which least was stolen, in their order."""
    return sorted(sorted(range(len(shares)), key=lambda turn: shares[turn])[:count])


def torch_of_peer() -> str:
    """Its version; the members import it, this process does not."""
    return metadata.version("torch")


def _stolen_s() -> float:
    """Of all processors, since the machine started."""
    try:
        counted = _COUNTERS.read_text().split(maxsplit=_STOLEN_COLUMN + 1)[_STOLEN_COLUMN]
    except (OSError, IndexError):
        return 0.0
    return int(counted) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long to measure: ``turns`` turns of ``steps`` steps, after ``warm`` unmeasured ones.

    The turns are shared among ``openings`` of both chains: the same chain opened again comes out
    somewhat faster or slower.

    Turns during which the host of a virtual machine took processors away are taken again, as long
    as there are no more than ``most`` times as many; then the quietest count.
    """

    warm: int = 1
    turns: int = 51
    steps: int = 1
    openings: int = 3
    most: int = 2

    def by_opening(self) -> list[Pace]:
        """The share of each opening, of one turn at least."""
        openings = min(self.openings, self.turns)
        fewest, more = divmod(self.turns, openings)
        return [replace(self, turns=fewest + (n < more), openings=1) for n in range(openings)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One runtime per step: wall time of the turns that count, CPU time of all."""

    steps_s: tuple[float, ...]
    cpu_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Duel:
    """Both sides; ``ratio`` is the median over pairs of neighbouring turns, so noise hits both.

    ``bound_s`` is the event simulator's time for our steps, ``busiest_s`` how long the passes of
    our stage that works most take in them: no step is shorter. ``stolen`` is the share of the
    processors' time that the host took in the turns that count, ``left_out`` how many do not.
    """

    ours: Side
    theirs: Side
    stolen: float
    left_out: int
    bound_ratio: float
    bound_s: float
    busiest_s: float

    @property
    def step_s(self) -> float:
        """Median of ours."""
        return median(self.ours.steps_s)

    @property
    def peer_step_s(self) -> float:
        """Median of the peer's."""
        return median(self.theirs.steps_s)

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return median(self._ratios())

    @property
    def ratio_quartiles(self) -> tuple[float, float]:
        """Between these lies the ratio of half of the pairs: how much the machine's noise says."""
        low, _, high = quantiles(self._ratios(), n=4, method="inclusive")
        return low, high

    def _ratios(self) -> list[float]:
        pairs = zip(self.ours.steps_s, self.theirs.steps_s, strict=True)
        return [a / b for a, b in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bout:
    """Both sides from opening their chains to closing them; of the turns that count."""

    ours: Side
    theirs: Side
    rows: list[StepSeconds]
    stolen: list[float]
    left_out: int


class Arena:
    """Two crews on one network, kept from case to case because starting them is slow.

    Raises BenchError with torch 2.9, whose own pipeline breaks off on gloo: the ranks greet each
    other with 8 bytes where 4 are expected.
    """

    def __init__(self, ours: Crew, theirs: Crew, network: Network) -> None:
        if torch_of_peer().startswith("2.9."):
            raise BenchError(
                f"torch {torch_of_peer()} cannot run its own pipeline: the bench needs a newer one"
            )
        self._ours, self._theirs, self._network = ours, theirs, network

    def duel(self, ours: Job, theirs: Job, pace: Pace, hop_s: float = 0.0) -> Duel:
        """Run one case; ``hop_s`` is how long a link carries one micro-batch.

        Raises BenchError when the two sides do not compute the same loss.
        """
        bouts = [self._bout(ours, theirs, part) for part in pace.by_opening()]
        for bout in bouts:
            _check_same(bout, ours)
        rows = [row for bout in bouts for row in bout.rows]
        return Duel(
            ours=_joined([bout.ours for bout in bouts]),
            theirs=_joined([bout.theirs for bout in bouts]),
            stolen=fmean(share for bout in bouts for share in bout.stolen),
            left_out=sum(bout.left_out for bout in bouts),
            bound_ratio=median(row.step_s / bound_s(ours, row, hop_s) for row in rows),
            bound_s=median(bound_s(ours, row, hop_s) for row in rows),
            busiest_s=median(_busiest_s(ours, row) for row in rows),
        )

    def _bout(self, ours: Job, theirs: Job, pace: Pace) -> _Bout:
        """Open both chains, let them take turns, close them."""
        open_chain(self._ours, ours)
        self._open_theirs(theirs)
        sides = {
            "ours": _Taken(lambda n: _turn(self._ours.ask(0, "steps", count=n))),
            "theirs": _Taken(lambda n: self._peer_turn(theirs, n)),
        }
        for _ in range(pace.warm):
            for side in sides.values():
                side.turn(pace.steps)
        before = self._cpu_s(ours, theirs)
        shares = _take_turns(list(sides.values()), pace)
        after = self._cpu_s(ours, theirs)
        kept = quietest(shares, pace.turns)
        rows = self._close(ours, theirs)[pace.warm * pace.steps :]
        cpu = [(b - a) / (len(shares) * pace.steps) for a, b in zip(before, after, strict=True)]
        return _Bout(
            ours=sides["ours"].side(cpu[0], kept),
            theirs=sides["theirs"].side(cpu[1], kept),
            rows=[row for t in kept for row in rows[t * pace.steps : (t + 1) * pace.steps]],
            stolen=[shares[turn] for turn in kept],
            left_out=len(shares) - len(kept),
        )

    def _open_theirs(self, job: Job) -> None:
        store = f"{self._network.host(0)}:{self._network.free_port()}"
        places = [{"job": to_json(job), "rank": r, "store": store} for r in range(job.stages)]
        self._theirs.ask_all("join", places)

    def _peer_turn(self, job: Job, count: int) -> Turn:
        turns = self._theirs.ask_all("steps", [{"count": count}] * job.stages)
        return Turn(wall_s=turns[0]["wall_s"], loss=turns[-1]["loss"])

    def _cpu_s(self, ours: Job, theirs: Job) -> tuple[float, float]:
        pairs = ((self._ours, ours), (self._theirs, theirs))
        mine, peer = (
            sum(u["cpu_s"] for u in crew.ask_all("usage", [{}] * job.stages)) for crew, job in pairs
        )
        return mine, peer

    def _close(self, ours: Job, theirs: Job) -> list[StepSeconds]:
        rows = self._ours.ask(0, "close")
        self._theirs.ask_all("close", [{}] * theirs.stages)
        del ours
        return [from_json(StepSeconds, json.dumps(row), "step") for row in rows]


class _Taken:
    """The turns of one side so far."""

    def __init__(self, take: Callable[[int], Turn]) -> None:
        self._take = take
        self._loss = float("nan")
        self.steps_s: list[float] = []

    def turn(self, steps: int) -> None:
        turn = self._take(steps)
        self.steps_s.append(turn.wall_s / steps)
        self._loss = turn.loss

    def side(self, cpu_s: float, kept: Sequence[int]) -> Side:
        return Side(
            steps_s=tuple(self.steps_s[turn] for turn in kept), cpu_s=cpu_s, loss=self._loss
        )


def _take_turns(sides: Sequence[_Taken], pace: Pace) -> list[float]:
    """Until enough were quiet; the share of each that was stolen."""
    for side in sides:
        side.steps_s.clear()
    shares: list[float] = []
    stolen = Stolen()
    most = pace.most * pace.turns
    while len(shares) < most and sum(share <= QUIET for share in shares) < pace.turns:
        # Who begins changes, so that neither always follows.
        for side in sides[:: 1 if len(shares) % 2 else -1]:
            side.turn(pace.steps)
        shares.append(stolen.share())
    return shares


def open_chain(crew: Crew, job: Job) -> None:
    """Make workers of a crew a chain of our runtime, driven by the first."""
    hosts = [crew.ask(stage, "serve") for stage in range(1, job.stages)]
    crew.ask(0, "drive", job=to_json(job), addresses=" ".join(hosts))


def bound_s(job: Job, step: StepSeconds, hop_s: float) -> float:
    """The event simulator's time for a step of these stage times, and the first stage's optimiser.

    The first stage ends last: its optimiser begins when the pipeline is over.
    """
    count = job.shape.micro_batches
    hops = (hop_s,) * (job.stages - 1)
    times = StepTimes(
        stage_s=(
            tuple(s.forward_s for s in step.stages),
            tuple(s.backward_s for s in step.stages),
        ),
        hop_s=(hops, hops),
        weights_s=tuple(s.weights_s for s in step.stages),
    )
    return replay(times, job.planned_depths, count).makespan_s + step.stages[0].optimizer_s


def _busiest_s(job: Job, step: StepSeconds) -> float:
    count = job.shape.micro_batches
    return max(count * s.pass_s for s in step.stages)


def _joined(sides: Sequence[Side]) -> Side:
    """One runtime over all openings, which took about as many turns each."""
    return Side(
        steps_s=tuple(step_s for side in sides for step_s in side.steps_s),
        cpu_s=fmean(side.cpu_s for side in sides),
        loss=sides[-1].loss,
    )


def _turn(answer: dict[str, float]) -> Turn:
    return Turn(wall_s=answer["wall_s"], loss=answer["loss"])


def _check_same(bout: _Bout, job: Job) -> None:
    ours, theirs = bout.ours.loss, bout.theirs.loss
    if job.codec == "fp32" and abs(ours - theirs) > SAME_LOSS * theirs:
        raise BenchError(f"the runtimes disagree: our loss is {ours:g}, the peer's {theirs:g}")
