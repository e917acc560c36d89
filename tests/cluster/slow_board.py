"""`collapipe` on a board that is as slow as a file says: every pass of a block sleeps.

The file named by `SLOW_BOARD` holds a factor, read before every pass, on 0.5 ms per block and 2 ms
per block and example of a forward pass, and twice that of a backward pass.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from collapipe_flwr.cli import main
from collapipe_flwr.pipeline.roles import MiddleStage

BLOCK_S, EXAMPLE_S = 5e-4, 2e-3


def slow_down(file: Path) -> None:
    """Make every middle stage of this process as slow as the file says."""
    compute, backpropagate = MiddleStage._compute, MiddleStage._backpropagate

    def sleep(stage: MiddleStage, examples: int, passes: float) -> None:
        blocks = len(stage.part.block_range)
        time.sleep(float(file.read_text()) * passes * blocks * (BLOCK_S + EXAMPLE_S * examples))

    def slow_compute(stage, frame, hidden):
        sleep(stage, len(hidden), 1.0)
        return compute(stage, frame, hidden)

    def slow_backpropagate(stage, flight, incoming):
        sleep(stage, flight.shape[0], 2.0)
        return backpropagate(stage, flight, incoming)

    MiddleStage._compute, MiddleStage._backpropagate = slow_compute, slow_backpropagate


if __name__ == "__main__":
    slow_down(Path(os.environ["SLOW_BOARD"]))
    main()
