"""Split training seen from the server: half of the model travels by Flower, half by the edge.

The embedding and the encoder blocks go to the clusters in Flower messages; a decoder replica per
cluster goes to the edge. When a cluster replies, both halves become one whole model again, so that
any Flower strategy can aggregate it.

A cluster whose ClientApp has mods, which clip or noise updates, gets the whole model in its message
instead. Its control unit fetches the trained decoder and replies with the whole model, so that no
mod sees a part of an update.

Personal parameters are trained, but never aggregated: the server keeps each cluster's own values,
puts them into its messages, and takes them out of its replies. In the global model they keep their
initial values.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from flwr.app import Array, ArrayRecord, RecordDict

from collapipe_flwr.cluster.fleet import LearningSettings
from collapipe_flwr.core.errors import Diverged, LinkError, ProtocolError, RunError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors, is_floating, widened
from collapipe_flwr.federation.checkpoint import Memory
from collapipe_flwr.federation.messages import diverged
from collapipe_flwr.federation.records import SplitTask, asked_optimizer
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.pipeline.config import PassesDone, SessionKey, SessionRequest, StageConfig
from collapipe_flwr.pipeline.meter import StageReport

log = logging.getLogger("flwr.collapipe")
Weights = Mapping[str, torch.Tensor]


@runtime_checkable
class EdgeGateway(Protocol):
    """Sessions at one edge server; every call ends within the gateway's own deadline."""

    @property
    def address(self) -> str:
        """Where clusters reach the edge."""

    def open(
        self, request: SessionRequest, weights: Weights, *, keep_optimizer: bool
    ) -> SessionKey:
        """Open a session with a replica; the key may be another. Raises LinkError."""

    def fetch(self, session: SessionKey) -> dict[str, torch.Tensor]:
        """The replica's current weights; raises LinkError."""

    def accept(self, session: SessionKey) -> None:
        """The global model contains the fetched weights: later sessions may use the optimizer."""

    def report(self, session: SessionKey) -> StageReport | None:
        """What the replica's stage measured, None if it never ran; raises LinkError."""

    def passes(self, session: SessionKey) -> PassesDone:
        """The micro-batches done so far, also within a step; raises LinkError."""

    def close(self, session: SessionKey) -> None:
        """End the session; idempotent. Raises LinkError if the edge cannot be reached."""


class SplitRound:
    """The edge sessions of one round, by cluster; :meth:`close` ends all of them."""

    def __init__(
        self,
        model: DescribedModel,
        edge: EdgeGateway,
        learning: LearningSettings,
        server_round: int,
        whole: Collection[str] = (),
    ) -> None:
        """``whole`` are the clusters that receive and return the whole model."""
        self.model = model
        self._edge = edge
        self._learning = learning
        self._server_round = server_round
        self._whole = whole
        self._sessions: dict[str, SessionKey] = {}

    def open(self, cluster_id: str, name: str, content: RecordDict, depth: int) -> SplitTask:
        """Give ``cluster_id`` its decoder replica of the model ``content[name]``.

        What Flower need not carry is taken out of that record. The replica is trained with the
        model's settings and the config in ``content``. Raises LinkError, RunError or ConfigError.
        """
        arrays = content.array_records[name]
        self._check_keys(set(arrays))
        if cluster_id in self._sessions:
            raise RunError(f"cluster {cluster_id} is asked twice in one round: give it one node")
        optimizer = asked_optimizer(content, self._learning.optimizer)
        learning = replace(self._learning, optimizer=optimizer)
        held = self.model.edge_keys | self.model.shared_keys
        weights = decode_tensors(ArrayRecord({k: a for k, a in arrays.items() if k in held}))
        request = SessionRequest(
            key=SessionKey.random(f"{cluster_id}-{self._server_round}"),
            spec_json=self.model.spec_json,
            stage=StageConfig(
                name="edge",
                schedule=learning.schedule,
                depth=depth,
                deadline_s=learning.deadline_s,
                execution=learning.execution.without_recompute,
            ),
            optimizer=optimizer,
            recoverable=True,
            readable=cluster_id in self._whole,  # it returns the decoder itself
            cluster_id=cluster_id,
            run_id=learning.run_id,
            server_round=self._server_round,
        )
        keeps = learning.keep_optimizer
        session = self._edge.open(request, weights, keep_optimizer=keeps)
        self._sessions[cluster_id] = session
        elsewhere = self._unsent_keys(cluster_id)
        content[name] = ArrayRecord({k: a for k, a in arrays.items() if k not in elsewhere})
        return SplitTask(
            model_spec_json=self.model.spec_json,
            edge_address=self._edge.address,
            session=session,
            learning=learning,
            shape=self.model.shape,
            whole=cluster_id in self._whole,
        )

    def join(self, cluster_id: str, reply: ArrayRecord, template: ArrayRecord) -> ArrayRecord:
        """The whole model of one cluster in the order of ``template``.

        Raises ProtocolError if a key is missing or unknown, or if an array has another shape or
        kind than the one that was sent; Diverged if one is not finite; LinkError if the edge fails.
        """
        elsewhere = self._unsent_keys(cluster_id)
        decoder = self._fetch_decoder(cluster_id)
        check_keys(set(reply), set(template) - elsewhere, f"cluster {cluster_id}")
        whole, aliases = ArrayRecord(), self.model.aliases
        for key, array in template.items():
            source = aliases.get(key, key)
            whole[key] = decoder[source] if source in elsewhere else reply[source]
            check_like(key, whole[key], array, cluster_id)
        constant = self.model.splitter.constant_keys  # never averaged; a mask may hold -inf
        trained = {key: array for key, array in whole.items() if key not in constant}
        check_finite(ArrayRecord(trained), cluster_id)
        return whole

    def accept(self, cluster_id: str) -> None:
        self._edge.accept(self._sessions[cluster_id])

    def report(self, cluster_id: str) -> StageReport | None:
        """What the decoder of one cluster measured; None, with a line in the log, if unknown."""
        try:
            return self._edge.report(self._sessions[cluster_id])
        except LinkError as error:
            log.warning("no report of the decoder of cluster %s: %s", cluster_id, error)
            return None

    def passes(self) -> dict[str, PassesDone]:
        """The progress of the clusters that the edge reports; from any thread."""
        found: dict[str, PassesDone] = {}
        for cluster_id, session in list(self._sessions.items()):
            with suppress(LinkError):  # the round itself handles a lost edge
                found[cluster_id] = self._edge.passes(session)
        return found

    def close(self, keep: Collection[str] = ()) -> None:
        """End every session but those of the clusters to ``keep``; errors are only logged."""
        for cluster_id in [name for name in self._sessions if name not in keep]:
            session = self._sessions.pop(cluster_id)
            try:
                self._edge.close(session)
            except LinkError as error:
                log.info("the edge session of cluster %s is gone: %s", cluster_id, error)

    def _check_keys(self, found: set[str]) -> None:
        """Raise RunError unless the global model has the keys of the model to split."""
        model = self.model
        missing = sorted(model.keys - found)
        extra = sorted(found - model.keys - model.aliases.keys())
        if missing or extra:
            wrong = f"lacks {missing[0]}" if missing else f"holds {extra[0]}"
            raise RunError(
                f"the global model {wrong}, unlike the model to split: start the strategy with "
                "initial_arrays=ArrayRecord(model.state_dict()) of the whole model"
            )

    def _unsent_keys(self, cluster_id: str) -> frozenset[str]:
        """The keys of arrays that Flower does not carry for this cluster."""
        if cluster_id in self._whole:
            return frozenset()
        return self.model.edge_keys.union(self.model.aliases)

    def _fetch_decoder(self, cluster_id: str) -> ArrayRecord:
        """The trained decoder; also of whole clusters, since its optimizer may be kept."""
        replica = self._edge.fetch(self._sessions[cluster_id])
        copies = self.model.shared_keys - self.model.edge_keys
        decoder = encode_tensors({k: v for k, v in replica.items() if k not in copies})
        check_keys(set(decoder), set(self.model.edge_keys), f"the edge for cluster {cluster_id}")
        return decoder


def check_keys(found: set[str], wanted: set[str], sender: str) -> None:
    """Raise ProtocolError unless ``sender`` returned exactly the wanted arrays."""
    if missing := sorted(wanted - found):
        raise ProtocolError(
            f"{sender} did not return {missing[0]} ({len(missing)} arrays are missing): reply with "
            "every array that was sent"
        )
    if extra := sorted(found - wanted):
        raise ProtocolError(
            f"{sender} returned {extra[0]}, which was not sent ({len(extra)} such arrays)"
        )


def check_like(key: str, array: Array, template: Array, cluster_id: str) -> None:
    """Raise ProtocolError unless a returned array has the shape and kind that were sent."""
    if tuple(array.shape) != tuple(template.shape) or is_floating(array) != is_floating(template):
        raise ProtocolError(
            f"cluster {cluster_id} returned {key} as {array.dtype} {tuple(array.shape)}, "
            f"it was sent as {template.dtype} {tuple(template.shape)}"
        )


def check_finite(whole: ArrayRecord, cluster_id: str) -> None:
    """Raise Diverged for a model with infinities or NaN, ProtocolError for arrays that are none."""
    for key, tensor in decode_tensors(whole).items():
        if tuple(tensor.shape) != tuple(whole[key].shape):
            raise ProtocolError(f"cluster {cluster_id} returned {key} with data of another shape")
        if tensor.is_floating_point() and not torch.isfinite(widened(tensor)).all():
            raise Diverged(f"cluster {cluster_id}: {diverged(key)}")


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
        clusters = self._clusters.items()
        return Memory.by_name({n: decode_tensors(ArrayRecord(arrays)) for n, arrays in clusters})

    def load(self, memory: Memory) -> None:
        found = memory.named_tensors().items()
        self._clusters = {name: dict(encode_tensors(tensors)) for name, tensors in found}
