"""Show a run that another thread pretends to do: its argument is the run directory.

Phases, two rounds with their bars, and the end, as `collapipe run` shows them.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from collapipe_flwr.reporting.events import RoundEvent
from collapipe_flwr.reporting.progress import ClusterProgress, ProgressFile
from collapipe_flwr.reporting.run_data import RunStory
from collapipe_flwr.reporting.run_directory import RunDirectory
from collapipe_flwr.reporting.screen import Follower, Screen
from tests.reporting.pseudo_terminal import lines_of

_DEADLINE_S = 60.0
SEGMENTS = [
    {"device_id": f"A/{i}-raspberry-pi-4", "first_block": i, "stop_block": i + 1} for i in range(9)
]
PLAN = {
    "clusters": [
        {"cluster_id": "A", "segments": SEGMENTS, "micro_batch_size": 8, "micro_batches": 4}
    ],
    "latency_s": 12.5,
}


def _event(index: int) -> RoundEvent:
    return RoundEvent(
        round_index=index,
        wall_s=1.0,
        metrics={"loss": 1.5, "exact_match": 0.25},
        loss=2.0,
        plan=PLAN,
        latency_s=13.0,
        clusters={"A": {"measured": False}},
        queues_j={"A/pi": 0.5},
    )


class Shown:
    """Standard output, and the wait for what is to be seen there."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._text = stream, ""
        self._written = threading.Condition()

    def write(self, text: str) -> int:
        with self._written:
            self._text += text
            self._written.notify_all()
        return self._stream.write(text)

    def wait_for(self, seen: Callable[[list[str]], bool]) -> None:
        """Until the lines written so far are such."""
        with self._written:
            assert self._written.wait_for(lambda: seen(lines_of(self._text)), _DEADLINE_S)

    def wait_for_bars(self, round_index: int) -> None:
        """Until a round's bar has moved, with all that stands beside it on a wide terminal."""
        if not self._stream.isatty():
            return
        words = ("steps", "ex/s", "left") if shutil.get_terminal_size().columns >= 80 else ()

        def moved(lines: list[str]) -> bool:
            bars = [x for x in lines if f"round {round_index}/2 training" in x and "━" in x]
            return len(set(bars)) > 1 and all(word in bars[-1] for word in words)

        self.wait_for(moved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def pretend(path: Path, shown: Shown) -> None:
    """Write what a ServerApp writes."""
    progress = ProgressFile(path, rounds=2)
    with progress.watch():
        progress.enter("reading the data and the model")
        shown.wait_for(lambda lines: any("reading the data" in line for line in lines))
        directory = RunDirectory(path)
        story = RunStory(metric_name="exact_match", energy_budget_j={}, rounds_asked=2)
        for index in (1, 2):
            done = itertools.count(index, 4)
            progress.enter(
                "training",
                round_index=index,
                look=lambda done=done: {
                    "A": ClusterProgress(
                        trained=min(next(done), 400), of=400, per_step=4, examples=8
                    )
                },
            )
            shown.wait_for_bars(index)
            event = _event(index)
            story.add(event)
            directory.append_event(event.as_json())
            directory.write_summary(story.summary(status="running", wall_s=float(index)))
        progress.enter("saving the model")
        shown.wait_for(lambda lines: any("saving the model" in line for line in lines))
        directory.write_summary(story.summary(status="completed", wall_s=2.0))


def main(path: Path) -> None:
    shown = Shown(sys.stdout)
    sys.stdout = shown  # type: ignore[assignment]
    screen = Screen()
    follower = Follower(path, screen)
    run = threading.Thread(target=pretend, args=(path, shown))
    with screen.phase("starting Flower"):
        run.start()
        while run.is_alive():
            follower.look()
            run.join(0.1)
        follower.look()
    story = RunStory(metric_name="exact_match", energy_budget_j={}, rounds_asked=2)
    screen.show_summary(story.summary(status="completed", wall_s=2.0))
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
