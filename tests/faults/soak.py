"""An hour of a real deployment with a fault every minute: nothing grows, nothing ends unasked.

    python -m tests.faults.soak --minutes 60 --seed 1700 --json FILE

starts a SuperLink with a database, two SuperNodes with resident control units, an edge and four
devices, each on a host of its own (network namespaces: as root), trains a very small model round
after round, and strikes as `soak_schedule` draws. The exit code is 1 if anything grew faster than
`growth` allows, a program ended unasked or would not end, or rounds stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from collapipe_flwr.core.processes import exit_on_signals
from tests.faults.growth import DISK_BOUNDS, PROCESS_BOUNDS, Growth, growth
from tests.faults.soak_schedule import EVERY_S, LASTS_S, Fault, schedule
from tests.faults.soak_site import RUN, Site, site
from tests.faults.usage import Life, Usage, disk_bytes

CLUSTERS = {"a": ("a1", "a2"), "b": ("b1", "b2")}
LOOK_S, SAMPLE_S, DISK_S = 0.5, 5.0, 15.0
FIRST_ROUND_S = 240.0
STOP_S = 60.0  # `TimeoutStopSec` of our services
LONGEST_PAUSE_S = 300.0  # between two rounds, whatever struck, twice in a row too


@dataclass(kw_only=True)
class Soak:
    """What happened so far; times are seconds since the first round ended."""

    site: Site
    duration_s: float
    faults: Sequence[Fault]
    began_s: float = 0.0
    rounds_s: list[float] = field(default_factory=list)
    samples: dict[Life, list[Usage]] = field(default_factory=lambda: defaultdict(list))
    disk: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    _waiting: list[Fault] = field(default_factory=list)
    _struck: list[Fault] = field(default_factory=list)
    _events: int = 0
    _events_bytes: int = 0
    _sampled_s: float = -SAMPLE_S
    _measured_s: float = -DISK_S

    def begin(self) -> None:
        """Return when the first round has ended."""
        self.began_s, end_s = time.monotonic(), time.monotonic() + FIRST_ROUND_S
        while not self.rounds_s:
            assert time.monotonic() < end_s, "the first round never ended"
            self._look()
        self.began_s = time.monotonic()
        self.samples.clear()
        self.disk.clear()
        self.rounds_s[:] = [0.0]
        self._sampled_s, self._measured_s = -SAMPLE_S, -DISK_S
        self._waiting = list(self.faults)

    def last(self) -> None:
        """Return when the time is over."""
        while self.now_s < self.duration_s:
            self._look()

    def heal(self) -> None:
        """End what still strikes."""
        while self._struck:
            self.site.heal(self._struck.pop())

    @property
    def now_s(self) -> float:
        """Seconds since the first round."""
        return time.monotonic() - self.began_s

    def _look(self) -> None:
        time.sleep(LOOK_S)
        self._count_rounds()
        if self.now_s >= self._sampled_s + SAMPLE_S:
            self._sample()
        self.site.tend(self.now_s)
        if self._struck and self._struck[0].at_s + LASTS_S <= self.now_s:
            self.heal()
        if self._waiting and self._waiting[0].at_s <= self.now_s:
            fault = self._waiting.pop(0)
            say(f"{self.now_s:6.0f} s, {len(self.rounds_s)} rounds: {fault.kind} {fault.role}")
            self._sample()
            self.site.strike(fault)
            self._struck.append(fault)

    def _count_rounds(self) -> None:
        with suppress(FileNotFoundError):
            events = self.site.deployment.run_folder() / "events.jsonl"
            if (size := events.stat().st_size) != self._events_bytes:
                count = events.read_bytes().count(b"\n")
                self.rounds_s += [self.now_s] * (count - self._events)
                self._events, self._events_bytes = count, size

    def _sample(self) -> None:
        self._sampled_s = self.now_s
        for life, usage in self.site.sample(self.now_s).items():
            self.samples[life].append(usage)
        if self.now_s >= self._measured_s + DISK_S:
            self._measured_s = self.now_s
            for place, paths in places(self.site.deployment.folder).items():
                taken = sum(disk_bytes(path) for path in paths)
                self.disk[place].append((self.now_s, float(taken)))

    def survivors(self) -> Iterator[tuple[Life, list[Usage]]]:
        """The processes that lived through the last half."""
        for life, seen in self.samples.items():
            begins, ends = self.duration_s / 2 + SAMPLE_S, self.duration_s - 2 * SAMPLE_S
            if seen[0].at_s <= begins and seen[-1].at_s >= ends:
                yield life, seen

    def growths(self) -> list[Growth]:
        """Of every survivor and every place."""
        half_s = self.duration_s / 2
        found = []
        for life, seen in self.survivors():
            of = life.role if life.host in ("server", "edge") else f"{life.role} on {life.host}"
            for what, bound in PROCESS_BOUNDS.items():
                series = [(usage.at_s, float(getattr(usage, what))) for usage in seen]
                found.append(growth(of, what, series, half_s, bound))
        for place, bound in DISK_BOUNDS.items():
            found.append(growth(place, "disk_bytes", self.disk[place], half_s, bound))
        return sorted(found, key=lambda each: (each.what, each.of))


def places(folder: Path) -> dict[str, list[Path]]:
    """Where programs write, by the names of `DISK_BOUNDS`."""
    return {
        "states of control units": [folder / f"state-{name}" for name in CLUSTERS],
        "devices' caches": [folder / "cache"],
        "temporary files": [folder / "tmp"],
        "run directory": [folder / "runs"],
        "Flower's home": [folder / "flower"],
        "Flower's database": list(folder.glob("state.db*")),
        "logs": list(folder.glob("*.log")),
    }


def say(words: str) -> None:
    """Tell whoever watches."""
    print(words, flush=True)


def pauses(soak: Soak) -> list[dict[str, Any]]:
    """Each fault with the longest time without the end of a round from it to the next one."""
    found = []
    for fault in soak.faults:
        end_s = min(fault.at_s + EVERY_S, soak.duration_s)
        begun = [at_s for at_s in soak.rounds_s if at_s <= fault.at_s][-1:]
        within = [at_s for at_s in soak.rounds_s if fault.at_s < at_s <= end_s]
        marks = [*begun, *within, end_s]
        longest = max(b - a for a, b in pairwise(marks))
        found.append({**asdict(fault), "rounds": len(within), "pause_s": round(longest, 1)})
    return found


def report(soak: Soak, seed: int, left: list[str]) -> dict[str, Any]:
    """Everything that is recorded."""
    events = soak.site.deployment.events()
    indices = [event["round_index"] for event in events]
    marks = [*soak.rounds_s, soak.duration_s]
    longest_s = max(b - a for a, b in pairwise(marks))
    growths = soak.growths()
    judged = {
        "nothing grew beyond its bound": all(each.is_bounded for each in growths),
        "nothing ended unasked": not soak.site.unasked,
        "all ended when told to": not left,
        "every round once, in order": indices == list(range(1, len(indices) + 1)),
        "never paused longer": longest_s <= LONGEST_PAUSE_S,
    }
    return {
        "passed": all(judged.values()),
        "judged": judged,
        "settings": {
            "minutes": soak.duration_s / 60,
            "seed": seed,
            "run_config": RUN,
            "bounds_per_hour": {**PROCESS_BOUNDS, **DISK_BOUNDS},
            "longest_pause_s": LONGEST_PAUSE_S,
            "cores": os.cpu_count(),
            "versions": {name: version(name) for name in ("torch", "flwr", "grpcio")},
        },
        "rounds": len(soak.rounds_s),
        "rounds_of_clusters": sum(len(event["clusters"]) - len(event["lost"]) for event in events),
        "runs": soak.site.runs,
        "longest_pause_s": round(longest_s, 1),
        "unasked": soak.site.unasked,
        "left": left,
        "growths": [{**asdict(each), "is_bounded": each.is_bounded} for each in growths],
        "faults": pauses(soak),
        "series": {
            f"{life.role} on {life.host}": _thinned(seen) for life, seen in soak.survivors()
        },
    }


def _thinned(seen: Sequence[Usage]) -> list[list[float]]:
    """About one sample per minute: seconds, bytes, descriptors, threads."""
    step = int(EVERY_S // SAMPLE_S)
    return [
        [round(each.at_s), each.memory_bytes, each.descriptors, each.threads]
        for each in seen[::step]
    ]


def run(minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    """Soak for so many minutes after the first round; what is written lies in ``folder``."""
    faults = schedule(seed, minutes * 60, list(CLUSTERS.values()))
    with site(folder, CLUSTERS) as found:
        soak = Soak(site=found, duration_s=minutes * 60, faults=faults)
        try:
            soak.begin()
            soak.last()
        except (AssertionError, SystemExit) as error:
            soak.duration_s = soak.now_s
            found.unasked.append(f"the soak ended after {soak.now_s:.0f} s: {error}")
        soak.heal()
        return report(soak, seed, found.stop(STOP_S))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help="keep what all programs write there")
    asked = parser.parse_args()
    with exit_on_signals(), tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        told = run(asked.minutes, asked.seed, asked.folder or Path(scratch))
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    say(json.dumps({key: told[key] for key in ("judged", "rounds", "longest_pause_s", "unasked")}))
    sys.exit(0 if told["passed"] else 1)


if __name__ == "__main__":
    main()
