"""`collapipe` on a board with a defect, which the file named by `FAULT_FILE` turns on and off.

The file is read before every pass of a part. It holds nothing, or one of

    nan | absurd | unimportable | raise | garbage | stuck | slow SECONDS | clock SECONDS

With ``once`` behind it, the defect strikes once.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from collapipe_flwr.cli import main
from collapipe_flwr.host.parts import Parts
from collapipe_flwr.pipeline.roles import LastStage, MiddleStage

FACTORS = {"nan": float("nan"), "absurd": 1e30}
STUCK_S = 3600.0


class Defect:
    """What the file says now."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def words(self) -> list[str]:
        """The defect and its number."""
        return [*self._file.read_text().split(), "", "0"]

    def strikes(self) -> tuple[str, float]:
        """The same; one that strikes once is over then."""
        words = self.words()
        if "once" in words:
            self._file.write_text("")
        return words[0], float(words[1] if words[1][:1].isdigit() else 0.0)


def spoil(file: Path) -> None:
    """Make the stages and the clock of this process as the file says."""
    defect, clock = Defect(file), time.time

    def shifted() -> float:
        words = defect.words()
        return clock() + (float(words[1]) if words[0] == "clock" else 0.0)

    time.time = shifted
    for kind in (MiddleStage, LastStage):
        _spoil_stage(kind, defect)
    replace = Parts.replace

    def unimportable(parts, session, tensors, arrived):
        if defect.words()[0] == "unimportable":
            raise ImportError("No module named 'transformers'")
        return replace(parts, session, tensors, arrived)

    Parts.replace = unimportable


def _spoil_stage(kind: type, defect: Defect) -> None:
    compute = kind._compute

    def spoilt(stage, frame, hidden):
        what, number = defect.strikes()
        if what == "raise":
            raise ImportError("No module named 'blocks'")
        if what == "garbage":
            link = stage.downstream or stage.upstream
            link._outbox.put((time.monotonic(), b"nonsense"), 1.0, size_bytes=8)
        if what in ("slow", "stuck"):
            time.sleep(number if what == "slow" else STUCK_S)
        return compute(stage, frame, hidden) * FACTORS.get(what, 1.0)

    kind._compute = spoilt


if __name__ == "__main__":
    spoil(Path(os.environ["FAULT_FILE"]))
    main()
