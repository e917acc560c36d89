"""What a cluster's optimiser knows, from one round to the next, where the run asks to keep it.

With a state directory (`state-dir` in a SuperNode's `--node-config`, or `train.state-dir`) it lies
in files, which a SuperNode that is started again finds, and a run that is resumed. Without one it
lies in Flower's state of the node, and both begin with a fresh optimiser. The decoder's part is
with the server (`RpcEdgeGateway`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context

from client_app.data import Place
from collapipe_flwr.cluster.optimizer_files import OptimizerFiles
from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.pipeline.state import PartState, Slots

log = logging.getLogger("flwr.collapipe")
STATE_KEY = "state-dir"
_STATE = "collapipe.optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Whether and where a cluster keeps its optimiser; ``files`` None: in Flower's state."""

    keep: bool
    files: OptimizerFiles | None = None

    @staticmethod
    def of(config: AppConfig, place: Place, context: Context, run_id: str) -> Keeping:
        """As run-config and node-config ask; raises ConfigError."""
        if config.train.optimizer_state != "keep":
            return Keeping(keep=False)
        folder = context.node_config.get(STATE_KEY, config.train.state_dir)
        if not isinstance(folder, str):
            raise ConfigError(f"node-config {STATE_KEY} must be the path of a folder: {folder!r}")
        if not folder or not run_id:
            return Keeping(keep=True)
        every = config.run.checkpoint_every
        path = Path(folder).expanduser()
        files = OptimizerFiles.of(path, run_id, place.index, every)
        return Keeping(keep=True, files=files)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The slots of embedding and blocks, or of a whole model, in one round."""

    context: Context
    keeping: Keeping
    server_round: int

    @property
    def keep(self) -> bool:
        """Whether the run asks for it."""
        return self.keeping.keep

    def recall(self) -> Slots:
        """What the last round of this cluster left."""
        slots = self._recalled() if self.keep else {}
        if slots is None and self.server_round > 1:
            keys = "" if self.keeping.files else f"; {STATE_KEY} in --node-config would keep it"
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
        if self.keeping.files is not None:
            self.keeping.files.remember(self.server_round, slots)
        else:
            tensors = PartState(weights={}, slots=slots).tensors()
            self.context.state.array_records[_STATE] = encode_tensors(tensors)

    def _recalled(self) -> Slots | None:
        if self.keeping.files is not None:
            return self.keeping.files.recall(self.server_round)
        record = self.context.state.array_records.get(_STATE)
        return None if record is None else PartState.of_tensors(decode_tensors(record)).slots
