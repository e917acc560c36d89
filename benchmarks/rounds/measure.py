"""Times the rounds of one model three ways: plain Flower, CollaPipe, and with what stays loaded."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.rounds.deployment import Deployment
from benchmarks.rounds.watch import Watch
from collapipe_flwr.core.errors import ConfigError, RunError

SIZES = ("demo", "bert-6x256", "bert-12x768")
RESIDENT, PER_MESSAGE = "resident", "per-message"
PHASES = ("plan_s", "deliver_s", "prepare_s", "train_s", "collect_s", "return_s", "close_s")
_RUN_S = 1200.0
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians over the rounds of one run but the first.

    ``cpu_s`` is of SuperNode, ClientApp and control unit, per round; ``app_cpu_s`` and
    ``rss_bytes`` (the largest) are of a message's own processes, ``unit_rss_bytes`` of the control
    unit and ``ready_rss_bytes`` of what ClientApps are forked from: both stay.
    """

    round_s: float
    train_s: float
    overhead_s: float
    longest_overhead_s: float
    phases: Mapping[str, float]
    cpu_s: float
    app_cpu_s: float
    rss_bytes: int
    unit_rss_bytes: int
    ready_rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCase:
    """Rounds with or without a resident control unit, beside plain Flower's in the same run."""

    model: str
    control_unit: str
    round_s: float
    train_s: float
    overhead_s: float
    flower_round_s: float
    cpu_s: float
    rss_bytes: int
    ours: Timing
    flower: Timing = field(repr=False)


def measure(sizes: list[str], rounds: int, say: Callable[[str], None]) -> Iterator[RoundCase]:
    """Every size both ways, each beside plain Flower; raises ConfigError and RunError."""
    unknown = sorted(set(sizes) - set(SIZES))
    if unknown:
        raise ConfigError(f"--models {unknown[0]} is not known: choose of {', '.join(SIZES)}")
    for size in sizes:
        for way in (PER_MESSAGE, RESIDENT):
            say(f"{size} {way}")
            yield _case(size, way, rounds)


def _case(size: str, way: str, rounds: int) -> RoundCase:
    """Both sides one after the other, on the same SuperLink and SuperNode."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="collapipe-rounds-")))
        deployment = Deployment(folder=folder, stack=stack, resident=way == RESIDENT)
        deployment.start()
        flower = _timed(deployment, "plain_client", size, rounds)
        ours = _timed(deployment, "relay", size, rounds)
        return RoundCase(
            model=size,
            control_unit=way,
            round_s=ours.round_s,
            train_s=ours.train_s,
            overhead_s=ours.overhead_s,
            flower_round_s=flower.round_s,
            cpu_s=ours.cpu_s,
            rss_bytes=ours.rss_bytes,
            ours=ours,
            flower=flower,
        )


def _timed(deployment: Deployment, client: str, size: str, rounds: int) -> Timing:
    marks = deployment.folder / f"{client}.json"
    config = {"num-server-rounds": rounds + 1, "size": size}
    roots = tuple(deployment.pids[n] for n in ("supernode", "control-unit") if n in deployment.pids)
    with Watch(roots) as watch:
        process, end_s = deployment.train(client, config, marks), time.monotonic() + _RUN_S
        while not marks.exists():
            if process.poll() is not None or time.monotonic() > end_s:
                raise RunError(f"the run failed:\n{deployment.log(f'run-{client}')}")
            time.sleep(_LOOK_S)
        process.wait(_RUN_S)
    told = json.loads(marks.read_text())
    return _timing(told["ends_s"], told["rounds"], watch)


def _timing(ends_s: list[float], rounds: list[dict[str, float]], watch: Watch) -> Timing:
    found = [_phases(*each) for each in zip(ends_s[1:-1], rounds[1:], ends_s[2:], strict=True)]
    overheads = [sum(phases.values()) - phases["train_s"] for phases in found]
    messages = watch.messages(len(found))
    return Timing(
        round_s=median(sum(phases.values()) for phases in found),
        train_s=median(phases["train_s"] for phases in found),
        overhead_s=median(overheads),
        longest_overhead_s=max(overheads),
        phases={name: median(phases[name] for phases in found) for name in PHASES},
        cpu_s=watch.cpu_between(ends_s[1], ends_s[-1]) / len(found),
        app_cpu_s=median(each.cpu_s for each in messages),
        rss_bytes=max(each.peak_bytes for each in messages),
        unit_rss_bytes=watch.unit.peak_bytes,
        ready_rss_bytes=watch.ready.peak_bytes,
    )


def _phases(begin_s: float, marks: Mapping[str, float], end_s: float) -> dict[str, float]:
    """Seconds from one mark of a round to the next."""
    names = ("planned_s", "called_s", "begun_s", "ended_s", "answered_s", "received_s")
    times = [begin_s, *(marks[name] for name in names), end_s]
    return dict(zip(PHASES, (b - a for a, b in pairwise(times)), strict=True))
