"""The processes of the testbed, each in a namespace of its own, and what they are told to do."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import child_environment
from benchmarks.data_plane.crew import BenchError
from benchmarks.testbed.brake import SHARE_FILE
from benchmarks.testbed.wire import KEY

START_S = 180.0  # to import everything, twelve at a time on two processors
STOP_S = 20.0
LOOK_S = 0.5
# One thread, as everywhere in the testbed: a board's share is one of a single processor.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class Machine:
    """One process, whose words go to ``log``; the file ``share`` beside it may slow its passes."""

    def __init__(
        self, name: str, place: Sequence[str], command: Sequence[str], log: Path, secret: str
    ) -> None:
        self.name, self._log, self.share = name, log, log.with_suffix(".share")
        # What is kept of frozen blocks must not come from a run before.
        ours = {KEY: secret, SHARE_FILE: str(self.share), "XDG_CACHE_HOME": str(log.parent)}
        with log.open("wb") as words:
            self._process = subprocess.Popen(
                [*place, sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                env={**child_environment(), **_ENVIRONMENT, **ours},
            )

    @property
    def pid(self) -> int:
        """Its process id: entering a namespace makes no other process."""
        return self._process.pid

    def wait_until_it_serves(self) -> None:
        """Raises BenchError when it does not say so in time."""
        self._line(START_S, lambda: None)

    def ask(self, do: str, deadline_s: float, look: Callable[[], None], **details: object) -> Any:
        """One order; ``look`` is called while it works. Raises BenchError with what it says."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._broken("has ended") from error
        answer = json.loads(self._line(deadline_s, look))
        if "fault" in answer:
            raise BenchError(f"{self.name} of the testbed: {answer['fault']}")
        return answer["result"]

    def stop(self) -> None:
        """It ends when its stdin does."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def wait(self) -> None:
        """After `stop`; by force when it does not end."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)

    def _line(self, deadline_s: float, look: Callable[[], None]) -> bytes:
        assert self._process.stdout is not None
        until_s = time.monotonic() + deadline_s
        while not select.select([self._process.stdout], [], [], LOOK_S)[0]:
            look()
            if time.monotonic() > until_s:
                raise self._broken(f"said nothing within {deadline_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._broken("has ended")
        return line

    def _broken(self, what: str) -> BenchError:
        words = self._log.read_text(errors="replace").strip().splitlines()
        last = words[-1] if words else "no word why"
        return BenchError(f"{self.name} of the testbed {what}: {last}")
