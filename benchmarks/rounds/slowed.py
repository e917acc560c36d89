"""Where the wall-clock seconds of rounds go on slow boards behind slow links: the testbed, traced.

Every device's round is cut at moments that its processes note, so its parts sum to the time from
the end of one evaluation to the beginning of the next; the run directory's own seconds of the round
are measured apart, and ``closes`` is the sum over them. Passes are split by CPU time: kernels by
themselves, and what autograd and Python around them take of the stage's thread, each at the board's
share of a processor. What a pass lasts beyond that went to the board's other threads, or to others
on this host.

``python -m benchmarks.rounds.slowed FILE`` prints a file's table for docs/results-pipeline.md.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from benchmarks.rounds.anatomy import AROUND, KERNELS, PRODUCTS, count_kernels
from benchmarks.rounds.bubbles import (
    BUBBLES,
    FRAMES,
    LOOP,
    OPTIMIZER,
    PASSES,
    Member,
    split_pipeline,
)
from benchmarks.rounds.metered import PASSES as TIMED_PASSES
from benchmarks.testbed.bed import running
from benchmarks.testbed.boards import WIRED_BIT_PER_S, Cluster, Slowness, boards, slowness
from benchmarks.testbed.measure import (
    PREPARED,
    host_flop_per_s,
    prepare,
    run_once,
    settings_json,
)
from benchmarks.testbed.trace import EVALUATED, MESSAGE, METER, REPORTS, TRACE, TRACED, read_notes
from benchmarks.testbed.training import Training, write_data
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.measurements import Span
from collapipe_flwr.core.processes import exit_on_signals
from collapipe_flwr.federation.client.pipeline_round import micro_batch
from collapipe_flwr.federation.run.learner import make_learner
from collapipe_flwr.reporting import output
from collapipe_flwr.reporting.events import holders

POLICY = "dssda"
SERVER_NAME = "server"
SERVER, OTHERS, UNIT = "server's way", "other clusters", "control unit"
HELD_UP = "passes held up"
OPENING, HAND_OUT, BEFORE = "opening", "hand-out", "bubble: before the pipeline"
COLLECTION, AFTER = "collection", "bubble: after the pipeline"
ROWS = (
    *(PRODUCTS, KERNELS, AROUND, HELD_UP, OPTIMIZER, LOOP, FRAMES),
    *(OPENING, HAND_OUT, COLLECTION),
    *(*BUBBLES, BEFORE, AFTER),
    *(UNIT, OTHERS, SERVER),
)
MOST_OFF = 0.03  # by which the parts of a round may miss its seconds
_HAND_OUT_CALLS = ("Missing", "PushWeights")
_COLLECTION_CALLS = ("Report", "Digests", "FetchWeights", "CloseSession")
CALLS = ("OpenSession", *_HAND_OUT_CALLS, *_COLLECTION_CALLS)
Json = dict[str, Any]
Notes = Sequence[Mapping[str, Any]]
Parts = dict[str, float]
Window = tuple[float, float]


def run_slowed(
    clusters: Sequence[Cluster], rounds: int, examples: int, json_file: Path | None
) -> None:
    """Measure, show and write; the first round of the run is not counted."""
    output.prepare("--json", json_file)
    training = Training(
        policies=(POLICY,), rounds=rounds + 1, repetitions=1, examples=examples, timeline=True
    )
    with (
        exit_on_signals(),
        tempfile.TemporaryDirectory(prefix="collapipe-anatomy-") as folder,
        output.progress(PREPARED + training.rounds) as tick,
    ):
        found = measure(clusters, training, Path(folder), tick)
    output.write_json(json_file, found)
    print(markdown(found), end="")
    off = max(abs(each["closes"] - 1) for done in found["rounds"] for each in done["devices"])
    Console(highlight=False).print(
        f"Parts miss the seconds of their rounds by {100 * off:.2f} % at most"
        + ("" if off <= MOST_OFF else f": more than {100 * MOST_OFF:g} %, so do not use them")
    )


def measure(
    clusters: Sequence[Cluster],
    training: Training,
    folder: Path,
    tick: Callable[[str], None],
) -> Json:
    """The JSON of the bench; ``folder`` is for run directories, logs, notes and data."""
    slow = slowness(clusters, host_flop_per_s(), os.cpu_count() or 1, 0.0)
    write_data(training.seeds, folder)
    os.environ[TRACED] = "1"
    try:
        with running(clusters, slow, folder) as bed:
            brake, figures, measured = prepare(bed, training, folder, tick)
            path = folder / "traced"
            run = run_once(bed, measured, POLICY, training.seed, path, tick)
            shaping = {"links": bed.links, "brake": brake}
    finally:
        del os.environ[TRACED]
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    config = training.run_config(POLICY, training.seed, path)
    traces = _Traces(folder, slow, _kernels_of(config))
    windows = _rounds(read_notes(folder / f"{SERVER_NAME}{TRACE}"), len(events))
    settings = settings_json(clusters, measured, slow, figures)
    return {
        "settings": settings | {"shaping": shaping, "blocks": run.blocks},
        "host_busy_share": run.busy_share,
        "rounds": [
            {
                "round": event["round_index"],
                "round_s": done.round_s,
                "predicted_s": done.predicted_s,
                "devices": [
                    device
                    for node, cluster in enumerate(clusters, start=1)
                    for device in traces.devices(cluster, node, window, event, done.round_s)
                ],
            }
            for event, done, window in zip(events, run.rounds, windows, strict=True)
        ][1:],
    }


def _rounds(notes: Notes, count: int) -> list[Window]:
    """The last ``count`` rounds: each from the end of an evaluation to the next one's beginning."""
    evaluated = [note for note in notes if note["what"] == EVALUATED][-count - 1 :]
    return [(before["end_s"], after["begin_s"]) for before, after in pairwise(evaluated)]


def _kernels_of(run_config: Mapping[str, Any]) -> Callable[[int, int, int], tuple[float, float]]:
    """CPU seconds of kernels for one micro-batch: by first block, stop and examples."""
    learner = make_learner(parse(run_config))
    task, splitter = learner.task, learner.splitter

    @cache
    def count(first: int, stop: int, size: int) -> tuple[float, float]:
        rows = task.make_examples(task.train.select(range(size))).to_list()
        return count_kernels(splitter, first, stop, micro_batch(splitter, task.collate(rows)))

    return count


@dataclass(frozen=True, slots=True)
class _Traces:
    """What the processes of a run have noted in ``folder``."""

    folder: Path
    slow: Slowness
    count_kernels: Callable[[int, int, int], tuple[float, float]]

    def notes(self, name: str, window: Window, *what: str) -> Notes:
        """The notes of a process on calls that ended in a window; ``what`` are kinds of them."""
        return [
            note
            for note in read_notes(self.folder / f"{name}{TRACE}")
            if window[0] <= note["end_s"] <= window[1] and note["what"] in what
        ]

    def devices(
        self, cluster: Cluster, node: int, window: Window, event: Mapping[str, Any], round_s: float
    ) -> Iterator[Json]:
        """Every device of a cluster, which is ``node``, that held blocks in one round."""
        unit, slow = cluster.control_unit.name, self.slow
        (plan,) = (p for p in event["plan"]["clusters"] if p["cluster_id"] == cluster.name)
        (message,) = filter(_trains, self.notes(unit, window, MESSAGE))
        (trained,) = self.notes(unit, window, REPORTS)
        messages = filter(_trains, self.notes(SERVER_NAME, window, MESSAGE))
        replies = {note["node"]: note["end_s"] for note in messages}
        chain = _chain(trained["stages"], plan, cluster, slow)
        pipeline = split_pipeline(chain)
        counts = {_plain(stage["name"]): stage["micro_batches"] for stage in trained["stages"]}
        driver = chain[0][0].spans
        whole = min(s.start_s for s in driver), max(s.stop_s for s in driver)
        for segment in plan["segments"]:
            blocks, size = (segment["first_block"], segment["stop_block"]), plan["micro_batch_size"]
            for name in map(_plain, holders(segment)):
                (share,) = (slow.share(board) for board in cluster.devices if board.name == name)
                spent = _spent(self.folder / f"{name}{METER}", window)
                parts = cut_round(
                    window,
                    (message["begin_s"], message["end_s"]),
                    (replies[node], max(replies.values())),
                    self.notes(name, window, *CALLS),
                    whole,
                    pipeline[name],
                )
                passes_s = sum(spent["parts"].get(part, 0.0) for part in TIMED_PASSES)
                kernels_s = (counts[name] * each_s for each_s in self.count_kernels(*blocks, size))
                parts = split_passes(parts, share, passes_s, *kernels_s)
                yield {
                    "device": name,
                    "blocks": blocks[1] - blocks[0],
                    "micro_batches": counts[name],
                    "examples": size,
                    "processor_share": share,
                    "cpu_s": spent["cpu_s"],
                    "cpu_parts_s": spent["parts"],
                    "parts_s": {row: parts[row] for row in ROWS},
                    "closes": fsum(parts.values()) / round_s,
                }


def cut_round(
    window: Window,
    message: Window,
    replies: Window,
    calls: Notes,
    whole: Window,
    pipeline: Mapping[str, float],
) -> Parts:
    """Seconds of a device's round by part; they sum to ``window``.

    Args:
        window: The round.
        message: When the control unit had the order, and when it had its reply ready.
        replies: When the server had this reply, and when it had all of them.
        calls: Notes of the device's own calls.
        whole: First and last moment of the pipeline.
        pipeline: The device's seconds between them by part.
    """
    opening = next(note for note in calls if note["what"] == "OpenSession")
    taken_s = max(
        (note["end_s"] for note in calls if note["what"] in _HAND_OUT_CALLS),
        default=opening["end_s"],
    )
    collecting = [note for note in calls if note["what"] in _COLLECTION_CALLS]
    left_s = max(note["end_s"] for note in collecting)
    collected_s = fsum(note["end_s"] - note["begin_s"] for note in collecting)
    return {
        SERVER: message[0] - window[0] + replies[0] - message[1] + window[1] - replies[1],
        OTHERS: replies[1] - replies[0],
        UNIT: opening["begin_s"] - message[0] + message[1] - left_s,
        OPENING: opening["end_s"] - opening["begin_s"],
        HAND_OUT: taken_s - opening["end_s"],
        BEFORE: whole[0] - taken_s,
        **pipeline,
        COLLECTION: collected_s,
        AFTER: left_s - whole[1] - collected_s,
    }


def split_passes(
    parts: Parts, share: float, passes_s: float, products_s: float, others_s: float
) -> Parts:
    """Split passes by their CPU seconds on a board with a share of a processor; the sum stays."""
    split = {name: seconds for name, seconds in parts.items() if name != PASSES}
    return {
        **split,
        PRODUCTS: products_s / share,
        KERNELS: others_s / share,
        AROUND: (passes_s - products_s - others_s) / share,
        HELD_UP: parts[PASSES] - passes_s / share,
    }


def _trains(note: Mapping[str, Any]) -> bool:
    return bool(note["type"].startswith("train"))


def _plain(name: str) -> str:
    return name.rpartition("/")[2]


def _chain(
    stages: Notes, plan: Mapping[str, Any], cluster: Cluster, slow: Slowness
) -> list[list[Member]]:
    """The cluster's stages in order, each with its replicas; the edge is wired."""
    uplinks = {board.name: board.uplink_bit_per_s for board in boards([cluster])}

    def member(report: Mapping[str, Any]) -> Member:
        rate = slow.rate_bytes_per_s(uplinks.get(_plain(report["name"]), WIRED_BIT_PER_S))
        spans = [
            Span(work=work, step=step, micro_batch=number, start_s=start_s, stop_s=stop_s)
            for work, step, number, start_s, stop_s in report["spans"]
        ]
        frames = max(report["micro_batches"], 1)
        return Member(
            name=_plain(report["name"]),
            spans=spans,
            down_s=report["down_bytes"] / frames / rate,
            up_s=report["up_bytes"] / frames / rate,
        )

    left = iter(map(member, stages))
    counts = (1, *(len(holders(segment)) for segment in plan["segments"]), 1)
    return [[next(left) for _ in range(count)] for count in counts]


def _spent(meter: Path, window: Window) -> Json:
    """CPU seconds of a process in a window, by the looks before and in it."""
    looks = read_notes(meter)
    before = [look for look in looks if look["at_s"] <= window[0]][-1]
    after = [look for look in looks if look["at_s"] <= window[1]][-1]
    parts = {
        part: seconds - before["parts"].get(part, 0.0) for part, seconds in after["parts"].items()
    }
    return {"cpu_s": after["cpu_s"] - before["cpu_s"], "parts": parts}


def markdown(found: Mapping[str, Any]) -> str:
    """Mean seconds of each device by part, over the rounds in which it held blocks."""
    rounds = found["rounds"]
    devices: dict[str, list[Json]] = {}
    for done in rounds:
        for device in done["devices"]:
            devices.setdefault(device["device"], []).append(device)
    heads = [name.removeprefix("cluster-").replace("raspberry-", "") for name in devices]
    lines = [f"| part | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]

    def row(title: str, *values: float, digits: int = 2) -> None:
        lines.append(f"| {title} | {' | '.join(f'{value:z.{digits}f}' for value in values)} |")

    for part in ROWS:
        row(part, *(fmean(each["parts_s"][part] for each in seen) for seen in devices.values()))
    row("all", *(fmean(fsum(d["parts_s"].values()) for d in seen) for seen in devices.values()))
    closes = (fmean(each["closes"] for each in seen) for seen in devices.values())
    row("all / the round's own seconds", *closes, digits=3)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))), end="")
