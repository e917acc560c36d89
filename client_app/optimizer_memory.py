"""What a cluster's optimiser knows, from one round to the next, where the run asks to keep it.

It lies in Flower's state of the node, per run: a SuperNode that is started again, and a run that is
resumed, begin with a fresh optimiser. The decoder's part is with the server (`RpcEdgeGateway`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flwr.app import Context

from collapipe_flwr.core.config import AppConfig
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.pipeline.state import PartState, Slots

log = logging.getLogger("flwr.collapipe")
_STATE = "collapipe.optimizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The slots of embedding and blocks, or of a whole model; nothing without ``keep``."""

    context: Context
    keep: bool
    server_round: int

    @staticmethod
    def of(config: AppConfig, context: Context, server_round: int) -> OptimizerMemory:
        """As the run-config asks."""
        keep = config.train.optimizer_state == "keep"
        return OptimizerMemory(context=context, keep=keep, server_round=server_round)

    def recall(self) -> Slots:
        """What the last round of this cluster left."""
        record = self.context.state.array_records.get(_STATE) if self.keep else None
        if record is None:
            if self.keep and self.server_round > 1:
                log.warning(
                    "no optimiser state of an earlier round here (a new SuperNode, or a resumed "
                    "run): it starts anew"
                )
            return {}
        return PartState.of_tensors(decode_tensors(record)).slots

    def remember(self, slots: Slots) -> None:
        """Keep what this round leaves."""
        if self.keep:
            tensors = PartState(weights={}, slots=slots).tensors()
            self.context.state.array_records[_STATE] = encode_tensors(tensors)
