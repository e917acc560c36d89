"""`collapipe` on a board that is as slow as a file says: every pass of a block sleeps.

The file named by `SLOW_BOARD` holds a factor, read before every pass, on 0.5 ms per block and 2 ms
per block and example of a forward pass, and twice that of a backward pass. A second number, if
there is one, multiplies what its reports say of that.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from collapipe_flwr.cli import main
from collapipe_flwr.pipeline.roles import MiddleStage

BLOCK_S, EXAMPLE_S = 5e-4, 2e-3


def slow_down(file: Path) -> None:
    """Make every middle stage of this process as slow as the file says."""
    compute, backpropagate = MiddleStage._compute, MiddleStage._backpropagate
    report = MiddleStage.report

    def sleep(stage: MiddleStage, examples: int, passes: float) -> None:
        blocks = len(stage.part.block_range)
        factor = float(file.read_text().split()[0])
        time.sleep(factor * passes * blocks * (BLOCK_S + EXAMPLE_S * examples))

    def slow_compute(stage, frame, hidden):
        sleep(stage, len(hidden), 1.0)
        return compute(stage, frame, hidden)

    def slow_backpropagate(stage, flight, incoming):
        sleep(stage, flight.shape[0], 2.0)
        return backpropagate(stage, flight, incoming)

    def false_report(stage):
        true, lie = report(stage), float([*file.read_text().split(), "1.0"][1])
        return replace(true, forward_s=lie * true.forward_s, backward_s=lie * true.backward_s)

    MiddleStage._compute, MiddleStage._backpropagate = slow_compute, slow_backpropagate
    MiddleStage.report = false_report


if __name__ == "__main__":
    slow_down(Path(os.environ["SLOW_BOARD"]))
    main()
