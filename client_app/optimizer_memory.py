"""What a cluster's optimiser knows, from one round to the next, where the run asks to keep it.

With a state directory it lies in files, which a SuperNode that is started again finds, and a run
that is resumed. Without one it lies in Flower's state of the node, and both begin with a fresh
optimiser. The decoder's part is with the server (`RpcEdgeGateway`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
        """What the last round of this cluster left."""
        slots = self._recalled() if self.keep else {}
        if slots is None and self.state.server_round > 1:
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
            files.remember(self.state.server_round, partial(write_slots, slots))
        else:
            tensors = PartState(weights={}, slots=slots).tensors()
            self.state.records.array_records[_STATE] = encode_tensors(tensors)

    def _recalled(self) -> Slots | None:
        if files := self.state.files(_SUFFIX):
            return files.recall(self.state.server_round - 1, read_slots)
        record = self.state.records.array_records.get(_STATE)
        return None if record is None else PartState.of_tensors(decode_tensors(record)).slots


def write_slots(slots: Slots, path: Path) -> None:
    """Write them as one safetensors file."""
    save_file(PartState(weights={}, slots=slots).tensors(), path)


def read_slots(path: Path) -> Slots:
    """What `write_slots` wrote; raises ModelError for another file."""
    try:
        return PartState.of_tensors(load_file(path)).slots
    except SafetensorError as error:
        raise ModelError(str(error)) from error
