"""The client side of the library: a Flower ClientApp whose model trains on a cluster of devices.

app = ClientApp()
cluster = Cluster(app)

@app.train()
def train(message, context):
    return cluster.train(message, context, load_data(context))
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import arrays_size_mod, message_size_mod
from torch import Tensor

from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.loader import LoaderSteps, joined, stacked
from collapipe_flwr.cluster.profile import describe_cluster
from collapipe_flwr.config.schema import EdgeConfig, WorldConfig
from collapipe_flwr.core.errors import ConfigError, unexpected_as_run_error
from collapipe_flwr.core.imports import allow
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.messages import only_arrays
from collapipe_flwr.federation.pipeline_round import PipelineRound, telemetry
from collapipe_flwr.federation.site import Site, cluster_file
from collapipe_flwr.host.allocator import configured_malloc

Metrics = Callable[[Tensor, Tensor], Mapping[str, float] | float]
DEVICES = "raspberry-pi-4,raspberry-pi-5,jetson-nano"
LABEL_NAMES = ("labels", "label")
EXAMPLES = 1000  # of a round, as long as nobody said
_HARMLESS = (message_size_mod, arrays_size_mod)


class Cluster:
    """Trains the model of a Flower client on its devices, and evaluates it there.

    ``devices`` are the presets of simulated ones, with ``;`` between those of one client and those
    of the next (clients take turns). A node whose ``--node-config`` names a ``cluster`` file uses
    the daemons in that. Rounds are planned for ``examples``. ``edge`` is how nodes without a
    cluster file reach an edge with TLS. ``threads`` are those of torch in this process.

    Models, losses and schedules of the package that makes it may be imported by name. Registers the
    query ``describe`` on ``app``, by which the server asks what the cluster is made
    of. Raises ConfigError for unknown presets.
    """

    def __init__(
        self,
        app: ClientApp,
        *,
        devices: str = DEVICES,
        control_unit: str = "raspberry-pi-5",
        memory_share: float = 1.0,
        examples: int = EXAMPLES,
        edge: EdgeConfig | None = None,
        threads: int = 1,
    ) -> None:
        self._app = app
        lists = tuple(tuple(map(str.strip, each.split(","))) for each in devices.split(";"))
        self._world = WorldConfig(
            devices=lists, control_unit=control_unit, memory_share=memory_share
        )
        for index in range(len(lists)):
            describe_cluster(self._world, index, examples)
        self._examples = examples
        self._edge = edge or EdgeConfig()
        self._threads = threads
        self._package = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        app.query("describe")(self.describe)
        # Mods of the app expect messages with arrays, and refuse all others.
        app._registered_funcs["query.describe"] = self.describe

    def describe(self, message: Message, context: Context) -> Message:
        """Answer the server's question what the cluster is made of."""
        with unexpected_as_run_error():
            profile = self._site(context).profile(self._examples)
            profile = replace(profile, whole=bool(mods_of(self._app)))
            return Message(records.write_profile(profile), reply_to=message)

    def train(
        self, message: Message, context: Context, batches: Iterable[Any], *, epochs: int = 1
    ) -> Message:
        """Train on every batch, ``epochs`` times over, and reply as a ClientApp does.

        ``batches`` yields dicts of tensors or pairs (inputs, labels), as a DataLoader does. One
        batch is one optimizer step; the server's plan chooses how it is cut and which device does
        what. The reply has the trained arrays, ``train_loss`` (the mean over the steps) and
        ``num-examples``.

        Raises DataError for batches of another size than planned and LinkError where the edge, or
        all devices, are lost.
        """
        asked, name, weights = self._begin(message)
        steps = LoaderSteps(
            loader=batches,
            micro_batch_size=asked.plan.micro_batch_size,
            batch_size=asked.plan.micro_batch_size * asked.plan.micro_batches,
            epochs=epochs,
        )
        with configured_malloc():
            result, absent = asked.run(
                self._site(context),
                weights,
                steps,
                examples=self._examples,
                batches=epochs * len(batches) if isinstance(batches, Sized) else 0,
            )
        told = telemetry(result, steps.examples * epochs, absent)
        loss = sum(result.losses) / max(len(result.losses), 1)
        metrics = MetricRecord({"train_loss": loss, records.EXAMPLES: steps.examples})
        trained = asked.completed(weights, result.weights)
        content = RecordDict({name: encode_tensors(trained), records.METRICS: metrics})
        return Message(records.write_telemetry(content, told), reply_to=message)

    def evaluate(
        self,
        message: Message,
        context: Context,
        batches: Iterable[Any],
        *,
        metrics: Metrics | None = None,
    ) -> Message:
        """Evaluate on every batch, and reply as a ClientApp does.

        The reply has ``eval_loss`` (the mean over all that the loss counts), ``num-examples`` and
        what ``metrics`` makes of the logits (N, ...) and labels of all N examples: numbers by name,
        or one number, which gets the name of the function. Sequences of different lengths are
        padded, labels by -100.
        """
        asked, _, weights = self._begin(message)
        steps = LoaderSteps(loader=batches, micro_batch_size=asked.plan.micro_batch_size)
        seen: list[dict[str, Tensor]] = []
        wanted = None if metrics is None else PredictionConfig(logits=True)
        with configured_malloc():
            found = asked.test(
                self._site(context),
                weights,
                _noted(steps, seen) if metrics else steps,
                examples=self._examples,
                wanted=wanted,
            )
        scores: Mapping[str, float] = {}
        if metrics is not None:
            logits = stacked([part for step in found.predictions for part in step])
            scores = _scores(metrics, logits, joined(seen))
        told = MetricRecord({"eval_loss": found.loss, records.EXAMPLES: steps.examples})
        for key, value in scores.items():
            told[key] = value
        return Message(RecordDict({records.METRICS: told}), reply_to=message)

    def _begin(self, message: Message) -> tuple[PipelineRound, str, dict[str, Tensor]]:
        """What is asked for, and the weights with the name of their record."""
        torch.set_num_threads(self._threads)
        if self._package != "__main__":
            allow(self._package)
        asked = PipelineRound.of(message.content)
        name, arrays = only_arrays(message.content, "the server's message")
        return asked, name, decode_tensors(arrays)

    def _site(self, context: Context) -> Site:
        index = int(context.node_config.get("partition-id", context.node_id))
        return Site(
            edge=self._edge,
            cluster=cluster_file(context.node_config),
            simulated=partial(describe_cluster, self._world, index),
        )


def _scores(metrics: Metrics, logits: Tensor, batch: Mapping[str, Tensor]) -> Mapping[str, float]:
    labels = next((batch[name] for name in LABEL_NAMES if name in batch), None)
    if labels is None:
        raise ConfigError(
            f"metrics need labels, but the batches hold only {', '.join(batch)}: have the loader "
            "yield them as 'labels'"
        )
    found = metrics(logits, labels)
    if isinstance(found, Mapping):
        return {str(name): float(value) for name, value in found.items()}
    return {getattr(metrics, "__name__", "metric"): float(found)}


def mods_of(app: ClientApp) -> list[Callable[..., Any]]:
    """The mods around the train function of ``app`` that may change what it is sent or replies."""
    found = []
    function: Any = app._registered_funcs.get("train.default")
    while (held := inspect.getclosurevars(function).nonlocals if function else {}).get("_mod"):
        found.append(held["_mod"])
        function = held["_ffn"]
    return [mod for mod in found if mod not in _HARMLESS]


def _noted(
    steps: Iterable[list[dict[str, Tensor]]], seen: list[dict[str, Tensor]]
) -> Iterator[list[dict[str, Tensor]]]:
    """The same steps, remembered in ``seen``."""
    for step in steps:
        seen += step
        yield step
