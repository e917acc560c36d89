"""The client side of the library: a Flower ClientApp whose model trains on a cluster of devices.

app = ClientApp()
cluster = Cluster(app)

@app.train()
def train(message, context):
    return cluster.train(message, context, load_data(context))
"""

from __future__ import annotations

import inspect
import logging
import reprlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import arrays_size_mod, message_size_mod
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from collapipe_flwr.cluster.evaluation import EvalResult, PredictionConfig
from collapipe_flwr.cluster.loader import (
    Batches,
    CountedBatches,
    LoaderBatches,
    SampledBatches,
    join_parts,
    stack_rows,
)
from collapipe_flwr.cluster.privacy import check_private, draw_privacy
from collapipe_flwr.cluster.profile import describe_cluster
from collapipe_flwr.config.schema import EdgeConfig, TrainConfig, WorldConfig
from collapipe_flwr.core.domain import ClusterProfile
from collapipe_flwr.core.errors import ConfigError, RunError, wrap_unexpected
from collapipe_flwr.core.imports import allow
from collapipe_flwr.core.keys import AUTO
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import decode_tensors, offload_tensors, take_record
from collapipe_flwr.federation.bundles import accept_bundles, array_records
from collapipe_flwr.federation.client.node_state import UPDATE_ERRORS, NodeState
from collapipe_flwr.federation.client.pipeline_round import ClusterRound, build_telemetry
from collapipe_flwr.federation.client.site import Site
from collapipe_flwr.federation.privacy_account import Charge, PrivacySpending, charge
from collapipe_flwr.federation.records import NO_SECURE_AGGREGATION, only_arrays
from collapipe_flwr.federation.updates import EXACT, encode_update, is_coded
from collapipe_flwr.host.allocator import trim_heap, use_one_heap
from collapipe_flwr.models.lora import is_adapter
from collapipe_flwr.models.tasks import LABEL_NAMES

_log = logging.getLogger(__name__)
_NO_PLACE = (
    "coded updates (links.updates, LearningSettings.updates) need a place around the mods of the "
    "ClientApp, which had functions already: make the Cluster right after it, Cluster(app)"
)
Metrics = Callable[[Tensor, Tensor], Mapping[str, float] | float]
DEVICES = "raspberry-pi-4,raspberry-pi-5,jetson-nano"
EXAMPLES = 1000  # of a round, by default
_SECURE = "flwr.client.mod.secure_aggregation"  # of the legacy API
_HARMLESS = (message_size_mod, arrays_size_mod)
_OURS = "collapipe_flwr."  # modules of mods whose changes no other mod sees


class Cluster:
    """Trains the model of a Flower client on its devices, and evaluates it there.

    ``devices`` are the presets of simulated devices, with ``;`` between the clients, which are
    assigned in rotation. A node whose ``--node-config`` names a ``cluster`` file uses the daemons
    in that file instead. Rounds are planned for ``examples``. ``edge`` is how nodes without a
    cluster file reach an edge with TLS. ``threads`` are those of torch in this process, and parts
    in it run on ``compute`` (``auto``, ``cpu``, ``cuda:1``).

    ``site`` instead reads all of this from a context, for an app with settings of its own; None
    means that the run has no place for a node.

    Models, losses and schedules of the package that calls this may be imported by name. Registers
    the query ``describe`` on ``app``, which returns the cluster's profile. Raises ConfigError for
    unknown presets.
    """

    def __init__(
        self,
        app: ClientApp,
        *,
        devices: str = DEVICES,
        control_unit: str = "raspberry-pi-5",
        memory_share: float = 1.0,
        examples: int | Callable[[Context], int] = EXAMPLES,
        edge: EdgeConfig | None = None,
        threads: int = 1,
        compute: str = AUTO,
        site: Callable[[Context], Site | None] | None = None,
    ) -> None:
        if not isinstance(app, ClientApp):
            raise ConfigError(f"Cluster needs your ClientApp, got {app!r}: Cluster(app)")
        if not isinstance(devices, str):
            raise ConfigError(f'devices must be a string, such as "{DEVICES}", got {devices!r}')
        self._app = app
        lists = tuple(tuple(map(str.strip, each.split(","))) for each in devices.split(";"))
        world = WorldConfig(devices=lists, control_unit=control_unit, memory_share=memory_share)
        for index in range(len(lists)):
            describe_cluster(world, index, EXAMPLES)
        self._examples = examples
        train = TrainConfig(threads=threads, compute=compute)
        self._site_of = site or partial(
            Site.of, world=world, edge=edge or EdgeConfig(), train=train
        )
        self._takes_bundles = accept_bundles(app, self._code_reply)
        self._package = sys._getframe(1).f_globals["__name__"].partition(".")[0]
        app.query("describe")(self.describe)
        # Mods of the app expect messages with arrays, and refuse all others.
        app._registered_funcs["query.describe"] = self.describe

    def describe(self, message: Message, context: Context) -> Message:
        """Reply with the description of the cluster.

        Raises ConfigError for an app whose replies no strategy could read.
        """
        with wrap_unexpected():
            if any(_SECURE in mod.__module__ for mod in mods_of(self._app)):
                raise ConfigError(NO_SECURE_AGGREGATION)
            site = self._site_of(context)
            if site is None:
                return Message(records.write_spare(), reply_to=message)
            return Message(
                records.write_profile(self._build_profile(site, context)), reply_to=message
            )

    def _build_profile(self, site: Site, context: Context) -> ClusterProfile:
        examples = self._examples(context) if callable(self._examples) else self._examples
        return replace(site.profile(examples), bundles=self._takes_bundles)

    def _try_profile(self, context: Context) -> ClusterProfile | None:
        """Return the current profile of a cluster file's devices; None for simulated ones.

        Also None if the file cannot be read, as while somebody edits it: that must not cost the
        round, and the server keeps the profile that it has.
        """
        try:
            site = self._site_of(context)
            if site is None or site.cluster is None or not site.cluster.devices:
                return None
            return self._build_profile(site, context)
        except ConfigError as error:
            _log.warning("the server keeps the profile that it has of this cluster: %s", error)
            return None

    def train(
        self,
        message: Message,
        context: Context,
        batches: Iterable[Any] | Batches,
        *,
        epochs: int = 1,
    ) -> Message:
        """Train on every batch, ``epochs`` times over, and return the reply of a ClientApp.

        ``batches`` yields dicts of tensors or pairs (inputs, labels), as a DataLoader does. One
        batch is one optimizer step; the server's plan chooses the micro-batches and the devices.
        :class:`Batches` cut themselves, and have epochs of their own. The reply has the trained
        arrays, ``train_loss`` (the mean over the steps) and ``num-examples``. The arrays of
        ``message`` are consumed, unless the app has mods.

        Raises DataError for batches or examples of another size than planned, and LinkError if the
        edge, or all devices, are lost.
        """
        start_s = time.perf_counter()
        with use_one_heap():
            if not self._takes_bundles and _asked_codec(message) != EXACT:
                raise ConfigError(_NO_PLACE)
            asked, name, weights = self._begin(message, context)
            if not isinstance(batches, Batches):
                batches = LoaderBatches(loader=batches, epochs=epochs, planned=asked.shapes)
            state = None
            if asked.task.learning.keep_optimizer:
                state = asked.site.state(message, context)
            privacy = asked.task.learning.privacy
            spent = PrivacySpending(None, None)
            if privacy.active:
                spent = self._charge(asked, asked.site.state(message, context), batches)
            result, absent = asked.run(weights, batches, state)
            metrics = MetricRecord({records.EXAMPLES: batches.examples})
            if privacy.on_gradients:  # losses of training get no noise
                result = replace(result, losses=())
            else:
                loss = sum(result.losses) / max(len(result.losses), 1)
                metrics["train_loss"] = loss
            trained = asked.complete(weights, result.weights)
            content = RecordDict({name: take_record(trained), records.METRICS: metrics})
            measured = build_telemetry(
                result, batches, absent, wall_s=time.perf_counter() - start_s
            )
            measured = replace(measured, profile=self._try_profile(context), **spent._asdict())
            content = records.write_telemetry(content, measured)
        return Message(content, reply_to=message)

    def _charge(self, asked: ClusterRound, state: NodeState, batches: Batches) -> PrivacySpending:
        """Charge a private order; raises ConfigError for what is no such order, and PrivacySpent.

        Nothing is charged for an order that would be refused.
        """
        noise = asked.task.learning.privacy
        kind = CountedBatches if noise.on_activations else SampledBatches
        if not isinstance(batches, kind):
            raise ConfigError(
                "privacy.clip-norm needs batches of which it is known how often they may hold an "
                "example, as the ServerApp of this project has clusters make them: leave it out "
                "with a loader of your own"
            )
        check_private(asked.splitter, asked.task.learning)
        if isinstance(batches, CountedBatches):
            # Not as for a draw: lengths and labels on links tell which examples a step has.
            everyone = batches.population
            due = Charge(
                examples=everyone,
                batch=everyone,
                noise_multiplier=noise.noise_multiplier,
                steps=batches.visits,
            )
            return charge(state, noise, due, due)
        draw_privacy(asked.splitter, asked.task.learning, asked.plan)
        due, largest = (
            Charge(
                examples=batches.population,
                batch=size,
                noise_multiplier=noise.noise_multiplier,
                steps=batches.count_batches(size),
            )
            for size in (asked.sizes[0], batches.largest_batch)
        )
        return charge(state, noise, due, largest)

    def _code_reply(
        self, message: Message, context: Context, call_next: ClientAppCallable
    ) -> Message:
        """Encode the model of a reply if the server asks for it; the outermost of all mods."""
        codec = _asked_codec(message)
        if codec == EXACT:
            return call_next(message, context)
        _, arrays = only_arrays(message.content, "the server's message")
        sent = offload_tensors(
            ArrayRecord({key: array for key, array in arrays.items() if is_coded(array, codec)})
        )
        reply = call_next(message, context)
        found = array_records(reply.content) if reply.has_content() else {}
        if len(found) == 1 and (site := self._site_of(context)) is not None:
            state, name = site.state(message, context), next(iter(found))
            reply.content[name] = record = found.pop(name).copy()
            errors = state.recall(UPDATE_ERRORS) or {}
            if (task := records.read_split_task(message.content)) and task.products:
                errors = {k: errors[k] for k in errors if not is_adapter(k)}  # of other factors
            state.remember(UPDATE_ERRORS, encode_update(record, sent, errors, codec))
        return reply

    def evaluate(
        self,
        message: Message,
        context: Context,
        batches: Iterable[Any] | TestSet,
        *,
        metrics: Metrics | None = None,
    ) -> Message:
        """Evaluate on every batch, and return the reply of a ClientApp.

        The reply has ``eval_loss`` (the mean over all that the loss counts), ``num-examples`` and
        the result of ``metrics`` for the logits (N, ...) and labels of all N examples: numbers by
        name, or one number, named after the function. Sequences of different lengths are padded,
        labels by -100. A :class:`TestSet` has its own metrics.
        """
        with use_one_heap():
            asked, _, weights = self._begin(message, context)
            if asked.task.learning.privacy.on_activations:
                raise ConfigError(
                    "privacy.noise-on=activations covers examples of training alone, and a test on "
                    "the cluster would send others to its devices: set evaluation.federated=false"
                )
            if not isinstance(batches, TestSet):
                batches = LoaderTest(loader=batches, metrics=metrics)
            found = asked.test(weights, batches.cut_steps(*asked.sizes), batches.wanted)
        scores = MetricRecord({"eval_loss": found.loss, **batches.scores(found)})
        return Message(RecordDict({records.METRICS: scores}), reply_to=message)

    def _begin(
        self, message: Message, context: Context
    ) -> tuple[ClusterRound, str, Mapping[str, Tensor]]:
        """Return the requested round, and the weights with the name of their record."""
        site = self._site_of(context)
        if site is None:
            raise RunError(f"node {context.node_id} has no place in this run")
        torch.set_num_threads(site.train.threads)
        if self._package != "__main__":
            allow(self._package)
        asked = ClusterRound.of(message.content, site)
        name, arrays = only_arrays(message.content, "the server's message")
        if not arrays:
            raise RunError(
                "the arrays of this message were consumed by an earlier call of train or evaluate: "
                "pass each message once"
            )
        weights = self._weights(arrays)
        trim_heap()  # the message's memory
        return asked, name, weights

    def _weights(self, arrays: ArrayRecord) -> Mapping[str, Tensor]:
        """Load the tensors: into memory only if mods compare them with the reply."""
        return decode_tensors(arrays) if mods_of(self._app) else offload_tensors(arrays)


def _asked_codec(message: Message) -> str:
    """Return the codec of the reply to a message; all but models to train are answered exactly."""
    if message.metadata.message_type.partition(".")[0] != "train" or not message.has_content():
        return EXACT
    task = records.read_split_task(message.content)
    return task.learning.updates if task else EXACT


def mods_of(app: ClientApp) -> list[Callable[..., Any]]:
    """Return the mods of train functions of ``app`` that may change messages or replies."""
    found = []
    for name, function in app._registered_funcs.items():
        inner: Any = function if name.startswith("train.") else None
        while (held := inspect.getclosurevars(inner).nonlocals if inner else {}).get("_mod"):
            found.append(held["_mod"])
            inner = held["_ffn"]
    return [m for m in found if m not in _HARMLESS and not m.__module__.startswith(_OURS)]


@runtime_checkable
class TestSet(Protocol):
    """Batches that cut themselves by a plan, as `Batches` do, and score their predictions."""

    @property
    def wanted(self) -> PredictionConfig | None:
        """The predictions that `scores` needs; None if it needs the loss alone."""

    def cut_steps(
        self, batch_size: int, micro_batch_size: int
    ) -> Iterable[list[dict[str, Tensor]]]:
        """Yield the micro-batches of every batch; raises DataError."""

    def scores(self, found: EvalResult) -> dict[str, float | list[float]]:
        """Return the reply's metrics besides the loss; ``num-examples`` weighs it in averages."""


@dataclass(slots=True, kw_only=True)
class LoaderTest:
    """The :class:`TestSet` of a user's ``loader``, scored by a function of logits and labels."""

    loader: Iterable[Any]
    metrics: Metrics | None
    _batches: LoaderBatches = field(init=False)
    _seen: list[dict[str, Tensor]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._batches = LoaderBatches(loader=self.loader, any_size=True)

    @property
    def wanted(self) -> PredictionConfig | None:
        return None if self.metrics is None else PredictionConfig(logits=True)

    def cut_steps(
        self, batch_size: int, micro_batch_size: int
    ) -> Iterator[list[dict[str, Tensor]]]:
        """Yield every batch as the loader does, and keep it if it has to be scored."""
        for step in self._batches.cut_steps(batch_size, micro_batch_size):
            if self.metrics is not None:
                self._seen += step
            yield step

    def scores(self, found: EvalResult) -> dict[str, float | list[float]]:
        """Return the number of examples, and the metrics over all of them; raises ConfigError."""
        scores: dict[str, float | list[float]] = {records.EXAMPLES: self._batches.examples}
        if self.metrics is None:
            return scores
        logits = stack_rows([part for step in found.predictions for part in step])
        value = self.metrics(logits, _find_labels(join_parts(self._seen)))
        if not isinstance(value, Mapping):
            value = {getattr(self.metrics, "__name__", "metric"): value}
        return scores | {str(name): _parse_score(str(name), score) for name, score in value.items()}


def _parse_score(name: str, score: Any) -> float:
    """Return a score of the user's metrics; raises ConfigError for one that is no number."""
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise ConfigError(
            f"metrics must return a number, or numbers by name, but {name!r} is "
            f"{reprlib.repr(score)}: let the function return one"
        ) from cause


def _find_labels(batch: Mapping[str, Tensor]) -> Tensor:
    labels = next((batch[name] for name in LABEL_NAMES if name in batch), None)
    if labels is None:
        raise ConfigError(
            f"metrics need labels, but the batches hold only {', '.join(batch)}: have the loader "
            "yield them as 'labels'"
        )
    return labels
