"""When the calls of a round began and ended, noted by the processes of the testbed on request.

A note is a line of JSON in ``NAME.trace`` beside the process's log. All processes of a host share
its monotonic clock. Where `TRACED` is not in the environment, nothing is noted.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks.rounds.metered import Meter, install
from benchmarks.testbed.brake import SHARE_FILE

TRACED = "COLLAPIPE_TESTBED_TRACED"  # environment: set for notes
TRACE, METER = ".trace", ".meter"  # suffixes
EVALUATED, MESSAGE, REPORTS = "evaluated", "message", "reports"  # notes besides a host's calls
Tell = Callable[..., Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class _Notes:
    path: Path
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str, begin_s: float, **more: object) -> None:
        """Note what began then and ends now."""
        note = {"what": what, "begin_s": begin_s, "end_s": time.perf_counter(), **more}
        with self.lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")

    def watch(self, owner: Any, name: str, what: str, tell: Tell) -> None:
        """Note every call of a function; ``tell`` gets its result and its arguments."""
        function = getattr(owner, name)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.perf_counter()
            result = function(*args, **kwargs)
            self.add(what, begin_s, **tell(result, *args))
            return result

        setattr(owner, name, call)


def read_notes(path: Path) -> list[dict[str, Any]]:
    """The notes of one process, in the order of their ends."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _asked() -> _Notes | None:
    return _Notes(_file(TRACE)) if TRACED in os.environ else None


def _file(suffix: str) -> Path:
    return Path(os.environ[SHARE_FILE]).with_suffix(suffix)


def trace_server() -> None:
    """Note messages to nodes, and evaluations, between which rounds lie."""
    if notes := _asked():
        from benchmarks.testbed.wire import Node
        from collapipe_flwr.federation.run.recorder import RunRecorder

        notes.watch(
            RunRecorder, "_evaluated", EVALUATED, lambda _, _me, number, *_a: {"round": number}
        )
        notes.watch(
            Node, "__call__", MESSAGE, lambda _, _me, message, *_a: _about(message.metadata)
        )


def trace_control_unit(unit: type) -> None:
    """Note messages and, of every round of training, the spans and bytes of all stages."""
    if notes := _asked():
        from collapipe_flwr.federation.client import pipeline_round

        notes.watch(unit, "message", MESSAGE, lambda _, _me, metadata, *_a: _about(metadata))
        notes.watch(pipeline_round, "train_round", REPORTS, lambda result, *_a: _stages(result))


def trace_host() -> None:
    """Note every call that is answered; meter the CPU seconds of parts."""
    if (notes := _asked()) is None:
        return
    from collapipe_flwr.host.server import Listener

    install(Meter(), _file(METER))
    answers: Any = Listener._yield_answers

    def answer(self: Any, method: Any, messages: Any, context: Any) -> Iterator[bytes]:
        begin_s = time.perf_counter()
        yield from answers(self, method, messages, context)
        notes.add(method.name, begin_s)

    Listener._yield_answers = answer  # type: ignore[method-assign]


def _about(metadata: Any) -> dict[str, object]:
    return {"type": metadata.message_type, "node": metadata.dst_node_id}


def _stages(result: Any) -> dict[str, object]:
    return {
        "stages": [
            {
                "name": report.name,
                "micro_batches": report.micro_batches,
                "down_bytes": report.sent_down.bytes,
                "up_bytes": report.sent_up.bytes,
                "spans": [
                    (span.work, span.step, span.micro_batch, span.start_s, span.stop_s)
                    for span in report.spans
                ],
            }
            for report in result.reports
        ]
    }
