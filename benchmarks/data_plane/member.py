"""One worker process: ``python -m benchmarks.data_plane.member HOST [FOLDER OF CERTIFICATES]``.

It answers one JSON line per question on stdin and exits when stdin closes, even while it works on
an answer. A worker of our runtime configures its heap as a daemon does, before torch starts
threads; a worker of the peer's is left as it is.
"""

from __future__ import annotations

import json
import os
import sys
from queue import SimpleQueue
from typing import TextIO

from collapipe_flwr.core.processes import end_with_parent
from collapipe_flwr.host.allocator import configure_malloc

_PEERS = ("join", "whole")  # questions that make a worker part of the peer


def main() -> None:
    """Answer until stdin ends."""
    worker, answers = None, _own_stdout()
    lines: SimpleQueue[str] = SimpleQueue()
    end_with_parent(lines.put)
    while True:
        asked = json.loads(lines.get())
        question = asked.pop("do")
        if worker is None:
            if question not in _PEERS:
                configure_malloc()
            from benchmarks.data_plane.worker import Worker

            worker = Worker(*sys.argv[1:])
        print(json.dumps(getattr(worker, question)(asked)), file=answers, flush=True)


def _own_stdout() -> TextIO:
    """Standard output for answers alone: gloo of torch 2.9 writes there, and now to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


if __name__ == "__main__":
    main()
