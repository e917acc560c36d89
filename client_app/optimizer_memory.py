"""The optimizer state of a cluster from one round to the next, where the run asks to keep it.

With a state directory it lies in files, which survive a restart of the SuperNode and serve a
resumed run. Without one it lies in Flower's state of the node, and both begin with a fresh
optimizer. Either way a round continues from the last one that the server accepted, as does the
decoder's part, which is with the server (`RpcEdgeGateway`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flwr.app import ArrayRecord
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from client_app.node_state import STATE_KEY, NodeState
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.pipeline.state import PartState, Slots

log = logging.getLogger("flwr.collapipe")
_STATE, _SUFFIX = "collapipe.optimizer", ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The slots of embedding and blocks, or of a whole model; ``keep``: the run asks for it."""

    state: NodeState
    keep: bool

    def recall(self) -> Slots:
        """What the last accepted round of this cluster left."""
        slots = self._recalled() if self.keep else {}
        if slots is None and self.state.progress.rounds:
            keys = "" if self.state.state_dir else f"; {STATE_KEY} in --node-config would keep it"
            log.warning(
                "no optimiser state of an earlier round here (a new SuperNode, or a resumed "
                "run): it starts anew%s",
                keys,
            )
        return slots or {}

    def remember(self, slots: Slots) -> None:
        """Keep what this round leaves."""
        if not self.keep:
            return
        if files := self.state.files(_SUFFIX):
            write = partial(write_slots, slots)
            files.remember(self.state.server_round, self.state.progress.needed, write)
        else:
            tensors = PartState(weights={}, slots=slots).tensors()
            self.state.remember(_STATE, encode_tensors(tensors))

    def _recalled(self) -> Slots | None:
        if files := self.state.files(_SUFFIX):
            return files.recall(self.state.progress.last_round, read_slots)
        record = self.state.recall(_STATE)
        if not isinstance(record, ArrayRecord):
            return None
        return PartState.of_tensors(decode_tensors(record)).slots


def write_slots(slots: Slots, path: Path) -> None:
    """Write them as one safetensors file."""
    save_file(PartState(weights={}, slots=slots).tensors(), path)


def read_slots(path: Path) -> Slots:
    """What `write_slots` wrote; raises ModelError for another file."""
    try:
        return PartState.of_tensors(load_file(path)).slots
    except SafetensorError as error:
        raise ModelError(str(error)) from error
