"""Show a run that another thread pretends to do: its argument is the run directory.

Phases, two rounds with their bars, and the end, as `collapipe run` shows them.
"""

import sys
import threading
import time
from pathlib import Path

from collapipe_flwr.reporting.events import RoundEvent, RunStory
from collapipe_flwr.reporting.following import Follower
from collapipe_flwr.reporting.progress import LOOK_S, ClusterProgress, ProgressFile
from collapipe_flwr.reporting.run_directory import RunDirectory
from collapipe_flwr.reporting.screen import Screen

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


def pretend(path: Path) -> None:
    """Write what a ServerApp writes."""
    progress = ProgressFile(path, rounds=2)
    with progress.watching():
        progress.enter("reading the data and the model")
        time.sleep(LOOK_S)
        directory = RunDirectory(path)
        story = RunStory(metric_name="exact_match", energy_budget_j={}, rounds_asked=2)
        for index in (1, 2):
            done = iter(range(index, 400, 40))
            progress.enter(
                "training",
                round_index=index,
                look=lambda done=done: {
                    "A": ClusterProgress(trained=next(done), of=400, per_step=4, examples=8)
                },
            )
            time.sleep(4 * LOOK_S)
            event = _event(index)
            story = RunStory(
                metric_name="exact_match",
                energy_budget_j={},
                rounds_asked=2,
                events=(*story.events, event),
            )
            directory.append_event(event.as_json())
            directory.write_summary(story.summary(status="running", wall_s=float(index)))
        progress.enter("saving the model")
        time.sleep(LOOK_S)
        directory.write_summary(story.summary(status="completed", wall_s=2.0))


def main(path: Path) -> None:
    screen = Screen()
    follower = Follower(path, screen)
    run = threading.Thread(target=pretend, args=(path,))
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
