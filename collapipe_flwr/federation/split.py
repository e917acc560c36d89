"""Split training seen from the server: a whole model to every cluster, and a whole one back.

Flower messages hold the whole model, as those of any Flower project, so that every mod and every
strategy sees whole updates. How a cluster cuts the model, and where it trains its parts, is its own
affair.

Personal parameters are trained, but never aggregated: the server keeps each cluster's own values,
puts them into its messages, and takes them out of its replies. In the global model they keep their
initial values.

The edge of clusters that name none is the run's, or one in the server's process. The clusters open
its sessions. The server asks only how far their rounds are.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from flwr.app import Array, ArrayRecord, RecordDict

from collapipe_flwr.cluster.order import LearningSettings
from collapipe_flwr.config.schema import EdgeConfig
from collapipe_flwr.core.errors import Diverged, LinkError, ProtocolError, RunError
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors, is_floating, widened
from collapipe_flwr.federation.border import explain_divergence
from collapipe_flwr.federation.checkpoint import ComponentState
from collapipe_flwr.federation.records import SplitTask, asked_optimizer
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.spec import PRODUCTS
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.pipeline.config import PassesDone
from collapipe_flwr.transport.client import HostClient

log = logging.getLogger("flwr.collapipe")
_PROGRESS_S = 2.0  # the caller polls


class SplitTraining:
    """The split model in one round; ``edge`` is for clusters that name none."""

    def __init__(
        self,
        model: DescribedModel,
        edge: DefaultEdge,
        learning: LearningSettings,
        *,
        whole_products: bool = False,
    ) -> None:
        """Show aggregated products of adapters whole, or else by their cores."""
        self.model, self.whole_products = model, whole_products
        self._edge = edge
        self._learning = learning

    def make_task(self, name: str, content: RecordDict, model: DescribedModel) -> SplitTask:
        """Make the task that trains the model ``content[name]`` by the config in ``content``.

        ``model`` is ours, with adapters of the cluster's rank. Raises RunError for another model,
        ConfigError for unusable settings.
        """
        self._check_keys(set(content.array_records[name]))
        optimizer = asked_optimizer(content, self._learning.optimizer)
        return SplitTask(
            model_spec_json=model.spec_json,
            edge_address="" if self._edge.is_here else self._edge.address,
            simulated_edge=self._edge.address if self._edge.is_here else "",
            learning=replace(self._learning, optimizer=optimizer),
            shape=self.model.shape,
            products=self.model.aggregate == PRODUCTS,
        )

    def check_reply(
        self, cluster_id: str, reply: ArrayRecord, template: ArrayRecord
    ) -> ArrayRecord:
        """Check the model of one cluster; returns it in the order of ``template``, tied keys alike.

        Raises ProtocolError if a key is missing or unknown, or if an array has another shape or
        kind than the one that was sent; Diverged if one is not finite.
        """
        check_keys(set(reply), set(template), f"cluster {cluster_id}")
        whole, aliases = ArrayRecord(), self.model.aliases
        for key, array in template.items():
            whole[key] = reply[aliases.get(key, key)]
            check_like(key, whole[key], array, cluster_id)
        constant = self.model.constant_keys  # never averaged; a mask may hold -inf
        trained = {key: array for key, array in whole.items() if key not in constant}
        check_finite(ArrayRecord(trained), cluster_id)
        return whole

    def _check_keys(self, found: set[str]) -> None:
        """Raise RunError unless the global model has the keys of the model to split."""
        model = self.model
        missing = sorted(model.keys - found)
        extra = sorted(found - model.keys - model.aliases.keys())
        if missing or extra:
            wrong = f"lacks {missing[0]}" if missing else f"holds {extra[0]}"
            whole = "model.state_dict()) of the whole model"
            adapters = "get_peft_model_state_dict(model, save_embedding_layers=False))"
            raise RunError(
                f"the global model {wrong}, unlike the model to split: start the strategy with "
                f"initial_arrays=ArrayRecord({adapters if model.splitter.prefix else whole}"
            )


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
            raise Diverged(f"cluster {cluster_id}: {explain_divergence(key)}")


class PersonalArrays:
    """The personal arrays of every cluster after its last accepted round, by key."""

    def __init__(self) -> None:
        self._clusters: dict[str, dict[str, Array]] = {}

    def insert(self, cluster_id: str, arrays: ArrayRecord) -> ArrayRecord:
        """Put the cluster's own values into ``arrays``; before its first round, the global ones."""
        own = self._clusters.get(cluster_id, {})
        return ArrayRecord({key: own.get(key, array) for key, array in arrays.items()})

    def keep(self, cluster_id: str, model: ArrayRecord, keys: Collection[str]) -> None:
        """Keep the personal arrays of an accepted model."""
        if keys:
            self._clusters[cluster_id] = {key: model[key] for key in keys}

    def dump(self) -> ComponentState:
        clusters = self._clusters.items()
        return ComponentState.by_name(
            {n: decode_tensors(ArrayRecord(arrays)) for n, arrays in clusters}
        )

    def load(self, memory: ComponentState) -> None:
        found = memory.named_tensors().items()
        self._clusters = {name: dict(encode_tensors(tensors)) for name, tensors in found}


class DefaultEdge:
    """An edge as the server sees it, which need not reach it unless it ``is_here``."""

    def __init__(self, client: HostClient, *, is_here: bool = False) -> None:
        self._client = client
        self.is_here = is_here

    @property
    def address(self) -> str:
        """Where clusters find it."""
        return self._client.address

    def progress(self) -> Mapping[str, PassesDone]:
        """Ask for each cluster's micro-batches in this round; empty if the edge does not answer."""
        try:
            return self._client.ask_progress(within_s=_PROGRESS_S)
        except LinkError as error:
            log.debug("the edge does not tell how far the round is: %s", error)
            return {}


@contextmanager
def open_edge(config: EdgeConfig) -> Iterator[DefaultEdge]:
    """Connect to the user's edge, or serve one on loopback during the body."""
    if config.address:
        with HostClient(
            config.address,
            tls=config.tls(),
            certificate_name=config.certificate_name,
            deadline_s=config.timeout_s,
        ) as client:
            yield DefaultEdge(client)
        return
    compute = resolve(config.compute, "edge.compute")
    with (
        HostServer("127.0.0.1:0", HostService(compute=compute)) as server,
        HostClient(server.address, deadline_s=config.timeout_s) as client,
    ):
        log.info("edge server on %s", server.address)
        yield DefaultEdge(client, is_here=True)
