"""Targets of the micro-batches in flight, which only head and loss read, within one process.

The first stage of a chain knows a batch's labels, and the last one needs them. Where both are in
one process, labels stay there: no frame holds them, so no other machine sees them, and no link
carries them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from torch import Tensor

from collapipe_flwr.core.errors import ProtocolError


class Targets:
    """Tensors by step and micro-batch, from the first stage of one chain to its last."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], Mapping[str, Tensor]] = {}
        self._lock = threading.Lock()

    def put(self, step: int, micro_batch: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a micro-batch's targets for the last stage; call it before sending the rest."""
        with self._lock:
            self._waiting[step, micro_batch] = tensors

    def take(self, step: int, micro_batch: int) -> Mapping[str, Tensor]:
        """Remove and return a micro-batch's targets. Raises ProtocolError if there are none."""
        with self._lock:
            found = self._waiting.pop((step, micro_batch), None)
        if found is None:
            raise ProtocolError(f"step {step} has no micro-batch {micro_batch}")
        return found
