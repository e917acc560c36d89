"""``collapipe`` in a process that tells where its CPU seconds go.

Functions are timed by the CPU clock of their thread, each without those that it calls; what runs in
no timed function, gRPC's own threads among it, is the rest of the process. Every answer to a status
call adds a line to the file of `METER`: the CPU seconds so far of the process and of every part.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from collapipe_flwr.cli import main
from collapipe_flwr.core.processes import end_with_parent

METER = "COLLAPIPE_METER"  # environment: a file
PASSES = ("forward", "backward")
PARTS = (
    *PASSES,
    "optimizer",
    "checks",  # of what arrives; norms of gradients; memory
    "stage loop",  # the rest of its thread
    "frames",  # to bytes and back
    "streams",  # between the stage and gRPC
    "opening",
    "hand-out",
    "collection",
    "intake",  # `transport.intake` looks at all connections five times a second
)
_CALLS = {
    "OpenSession": "opening",
    **dict.fromkeys(("Missing", "PushWeights"), "hand-out"),
    **dict.fromkeys(("Digests", "FetchWeights", "Report", "CloseSession"), "collection"),
    "Stream": "streams",
}
_WHOLE = ("hand-out", "collection")  # with all that is called meanwhile
_END = object()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.parts: list[str] = []  # that run now, the innermost last
        self.since_s = 0.0


class Meter:
    """CPU seconds by part, of all threads together."""

    def __init__(self) -> None:
        self.cpu_s = defaultdict[str, float](float)
        self._here = _Thread()
        self._lock = threading.Lock()

    def enter(self, part: str) -> None:
        """Begin a part on this thread."""
        here, now_s = self._here, time.thread_time()
        if here.parts:
            self._add(here.parts[-1], now_s - here.since_s)
        around = here.parts[-1] if here.parts else ""
        here.parts.append(around if around in _WHOLE else part)
        here.since_s = now_s

    def leave(self) -> None:
        """End the innermost part."""
        here, now_s = self._here, time.thread_time()
        self._add(here.parts.pop(), now_s - here.since_s)
        here.since_s = now_s

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call

    def timed_items(self, part: str, items: Iterator[Any]) -> Iterator[Any]:
        """The items of a generator, timed."""
        following = self.timed(part, next)
        while (item := following(items, _END)) is not _END:
            yield item

    def write(self, path: Path) -> None:
        """Add a line to the file."""
        with self._lock, path.open("a") as file:
            told = {"at_s": time.perf_counter(), "cpu_s": time.process_time()}
            told["parts"] = dict(self.cpu_s)
            file.write(json.dumps(told) + "\n")

    def _add(self, part: str, cpu_s: float) -> None:
        with self._lock:
            self.cpu_s[part] += cpu_s


def install(meter: Meter, path: Path) -> None:
    """Time the parts of this process from now on."""
    from collapipe_flwr.host.server import Listener
    from collapipe_flwr.host.service import HostService
    from collapipe_flwr.pipeline import roles, stage
    from collapipe_flwr.pipeline.backward import DeferredGradients
    from collapipe_flwr.pipeline.meter import MemoryMeter
    from collapipe_flwr.pipeline.optimizer import Optimizer
    from collapipe_flwr.transport import stream
    from collapipe_flwr.transport.intake import Intake

    places: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("forward", roles.MiddleStage, ("_compute",)),
        ("forward", roles.LastStage, ("_compute",)),
        ("backward", stage.Stage, ("_backpropagate",)),
        ("backward", DeferredGradients, ("add",)),
        ("optimizer", Optimizer, ("step", "zero_grad", "add_proximal")),
        ("checks", stage, ("check_sound", "sum_squares")),
        ("checks", MemoryMeter, ("set_fixed", "hold", "note_rest", "release")),
        ("stage loop", roles._Follower, ("serve",)),
        ("frames", stream, ("encode_frame", "decode_frame")),
        ("streams", stream.StreamLink, ("feed",)),
        ("opening", HostService, ("serve",)),  # of links to the next hosts
        ("intake", Intake, ("look",)),
    )
    for part, owner, names in places:
        for name in names:
            setattr(owner, name, meter.timed(part, getattr(owner, name)))
    answers: Any = Listener._yield_answers
    status: Any = Listener._encode_status

    def answer(self: Any, method: Any, messages: Any, context: Any) -> Iterator[bytes]:
        items = answers(self, method, messages, context)
        part = _CALLS.get(method.name)
        return meter.timed_items(part, items) if part else items

    def encode_status(self: Any) -> Any:
        meter.write(path)
        return status(self)

    Listener._yield_answers = answer  # type: ignore[method-assign]
    Listener._encode_status = encode_status  # type: ignore[method-assign]


if __name__ == "__main__":
    end_with_parent()
    install(Meter(), Path(os.environ[METER]))
    main()
