"""A process of a bench: does what its parent asks on stdin, one JSON line for each question.

Run as ``python -m collapipe_flwr.benches.member HOST [FOLDER OF CERTIFICATES]``; it ends with its
stdin, also in the midst of an answer. One that becomes part of our runtime sets up its heap as a
daemon does, before torch starts threads; a peer is left as it is.
"""

from __future__ import annotations

import json
import sys
from queue import SimpleQueue

from collapipe_flwr.core.lifeline import end_with_parent
from collapipe_flwr.host.allocator import configure_malloc

_PEERS = ("join", "whole")


def main() -> None:
    """Answer until stdin ends."""
    worker = None
    lines: SimpleQueue[str] = SimpleQueue()
    end_with_parent(lines.put)
    while True:
        asked = json.loads(lines.get())
        question = asked.pop("do")
        if worker is None:
            if question not in _PEERS:
                configure_malloc()
            from collapipe_flwr.benches.worker import Worker

            worker = Worker(*sys.argv[1:])
        sys.stdout.write(json.dumps(getattr(worker, question)(asked)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
