"""Parameters that each cluster keeps for itself: trained, but never aggregated.

The server holds every cluster's own values beside the global model, puts them into the cluster's
messages, and takes them out of its replies before aggregation. In the global model they keep their
initial values.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from flwr.app import Array, ArrayRecord

from collapipe_flwr.federation.checkpoint import Memory


class PersonalArrays:
    """The personal arrays of every cluster after its last accepted round, by key."""

    def __init__(self) -> None:
        self._clusters: dict[str, dict[str, Array]] = {}

    def insert(self, cluster_id: str, arrays: ArrayRecord) -> ArrayRecord:
        """``arrays`` with the cluster's own values; before its first round, the global ones."""
        own = self._clusters.get(cluster_id, {})
        return ArrayRecord({key: own.get(key, array) for key, array in arrays.items()})

    def keep(self, cluster_id: str, model: ArrayRecord, keys: Collection[str]) -> None:
        """Keep the personal arrays of an accepted model."""
        if keys:
            self._clusters[cluster_id] = {key: model[key] for key in keys}

    def dump(self) -> Memory:
        """All arrays as text, which keeps any dtype."""
        kept = {
            name: {
                key: [array.dtype, list(array.shape), array.stype, array.data.hex()]
                for key, array in arrays.items()
            }
            for name, arrays in self._clusters.items()
        }
        return Memory(text=json.dumps(kept))

    def load(self, memory: Memory) -> None:
        kept = json.loads(memory.text or "{}")
        self._clusters = {
            name: {
                key: Array(dtype, tuple(shape), stype, bytes.fromhex(data))
                for key, (dtype, shape, stype, data) in arrays.items()
            }
            for name, arrays in kept.items()
        }
