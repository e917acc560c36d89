"""From the run-config to what a run needs: task, model, inner strategy, world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import fsum
from operator import mul
from pathlib import Path
from statistics import mean
from typing import Any, cast

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, Strategy

from collapipe_flwr.core.config import AppConfig, LinksConfig, count_list, name_list
from collapipe_flwr.core.domain import ClusterProfile, DeviceProfile, ModelProfile
from collapipe_flwr.core.errors import ConfigError, DataError, blaming
from collapipe_flwr.data.metrics import added
from collapipe_flwr.data.registry import load_task
from collapipe_flwr.data.settings import TRAIN_TOKENIZER, settings_of
from collapipe_flwr.data.tasks import Task
from collapipe_flwr.federation.planning import ScheduledRounds
from collapipe_flwr.federation.records import read_tally
from collapipe_flwr.models import BatchShape, LoraSettings, ModelSpec, Splitter, make_spec
from collapipe_flwr.models.checkpoint import read_pretrained_config
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import OptimizerSettings
from collapipe_flwr.scheduler.protocol import SchedulerSettings
from collapipe_flwr.scheduler.registry import make_scheduler
from collapipe_flwr.simulator.world import Budgets, World, make_world
from server_app.evaluate import scores

_STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
}
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
_MOST_SHOWN = 6  # tensors in a sentence
_SHAPE_EXAMPLES, _SHAPE_BATCH = 256, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """What is learnt and by which model."""

    task: Task
    spec: ModelSpec
    splitter: Splitter
    shape: BatchShape


def make_learner(config: AppConfig) -> Learner:
    """Load the task and build the model for it; raises ConfigError, DataError or ModelError."""
    _refuse_foreign_tokenizer(config)
    known_labels = _known_labels(config.model.pretrained)
    task = load_task(settings_of(config.data, config.run.seed), known_labels=known_labels)
    spec = _spec(config, task)
    splitter = Splitter(spec)
    _refuse_long_texts(config, task, splitter.most_tokens)
    _refuse_small_test(config, task)
    return Learner(task=task, spec=spec, splitter=splitter, shape=_shape(task))


def _known_labels(pretrained: str) -> tuple[str, ...]:
    """What the head of a checkpoint calls its classes, in order; ``LABEL_0`` and so on by default.

    Raises ModelError where there is no checkpoint.
    """
    if not pretrained:
        return ()
    with blaming("model.pretrained"):
        names = read_pretrained_config(pretrained).id2label or {}
    return tuple(name for _, name in sorted(names.items()))


def _refuse_foreign_tokenizer(config: AppConfig) -> None:
    """Raise ConfigError where a checkpoint would read the numbers of other tokens than its own."""
    folder = Path(config.model.pretrained).expanduser()
    files = ("tokenizer.json", "tokenizer_config.json")
    brings_one = config.model.pretrained and any((folder / name).is_file() for name in files)
    if brings_one and config.data.tokenizer == TRAIN_TOKENIZER:
        raise ConfigError(
            'data.tokenizer is "train", but model.pretrained has learnt from the tokens of its '
            f"own: set data.tokenizer={folder}"
        )


def _refuse_long_texts(config: AppConfig, task: Task, most_tokens: int | None) -> None:
    """Raise ConfigError where texts may grow longer than the model's positions."""
    if not task.text_columns or most_tokens is None:
        return
    lengths = {"max-source-length": config.data.max_source_length}
    if task.model_task == "seq2seq":
        lengths["max-target-length"] = config.data.max_target_length
    for name, length in lengths.items():
        if length > most_tokens:
            raise ConfigError(
                f"data.{name} is {length}, but the model has only {most_tokens} positions: set "
                f"data.{name}={most_tokens}, or raise max_position_embeddings in model.overrides"
            )


def _refuse_small_test(config: AppConfig, task: Task) -> None:
    """Raise DataError where a cluster would have nothing to evaluate."""
    if config.evaluation.federated and len(task.test) < config.run.clusters:
        raise DataError(
            f"{len(task.test)} test examples are too few for {config.run.clusters} clusters to "
            "evaluate: raise data.test-examples or set evaluation.federated to false"
        )


def drawn_sentence(pretrained: str, keys: Sequence[str]) -> str:
    """Which tensors a checkpoint lacks, and that this is as it should be."""
    shown = ", ".join(keys[:_MOST_SHOWN]) + (", ..." if len(keys) > _MOST_SHOWN else "")
    return (
        f"new in this run, drawn by chance, because {pretrained} has none that fit: {len(keys)} "
        f"tensors ({shown}); they are the head of the task and have to be trained"
    )


def _spec(config: AppConfig, task: Task) -> ModelSpec:
    labels = dict(enumerate(task.labels))
    pretrained = config.model.pretrained
    tokens = _token_settings(task, from_checkpoint=bool(pretrained))
    with blaming("model.pretrained" if pretrained else "model.type, model.overrides"):
        return make_spec(
            task.model_task,
            model_type=None if pretrained else config.model.type,
            pretrained=pretrained or None,
            overrides={**config.model.settings, **_image_settings(config, task)},
            num_labels=len(labels) or None,
            id2label=labels or None,
            edge_blocks=config.model.edge_blocks,
            ties=config.model.ties,
            shared=config.model.shared,
            lora=_lora(config),
            **tokens,
        )


def _lora(config: AppConfig) -> LoraSettings | None:
    """The adapters asked for; raises ConfigError where there is nothing to put them on."""
    lora = config.lora
    if lora.rank == 0:
        return None
    if not config.model.pretrained:
        raise ConfigError(
            f"lora.rank is {lora.rank}, but model.pretrained is empty: adapters need a checkpoint "
            "below them; name one, or set lora.rank=0"
        )
    return LoraSettings(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        target_modules=tuple(lora.target_modules.replace(",", " ").split()),
        modules_to_save=tuple(lora.modules_to_save.replace(",", " ").split()),
        frozen_dtype=lora.frozen_dtype,
    )


def _token_settings(task: Task, *, from_checkpoint: bool) -> dict[str, Any]:
    """The vocabulary that the model must have; nothing where no text is read.

    A checkpoint knows by which token its decoder starts: BART's is not the padding.
    """
    if not task.text_columns:
        return {}
    tokenizer = task.tokenizer
    starts = task.model_task == "seq2seq" and not from_checkpoint
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id if starts else None,
    }


def _image_settings(config: AppConfig, task: Task) -> dict[str, object]:
    """The pictures that the model must take; raises ConfigError where it takes others."""
    if task.model_task != "image-classification":
        return {}
    ours: dict[str, object] = {
        "image_size": config.data.image_size,
        "num_channels": config.data.image_channels,
    }
    theirs = config.model.settings
    if config.model.pretrained:
        theirs = {**read_pretrained_config(config.model.pretrained).to_dict(), **theirs}
    for key, name in (("image_size", "image-size"), ("num_channels", "image-channels")):
        if theirs.get(key, ours[key]) != ours[key]:
            raise ConfigError(
                f"data.{name} is {ours[key]}, but the model takes {theirs[key]}: "
                f"set data.{name}={theirs[key]}"
            )
    return {} if config.model.pretrained else ours


def _shape(task: Task) -> BatchShape:
    """Mean padded lengths of some micro-batches: what a block has to compute on."""
    first = task.train.select(range(min(_SHAPE_EXAMPLES, len(task.train))))
    rows = task.examples(first).to_list()
    starts = range(0, len(rows), _SHAPE_BATCH)
    batches = [task.collate(rows[start : start + _SHAPE_BATCH]) for start in starts]
    targets = [b["labels"].shape[1] if b["labels"].dim() > 1 else 1 for b in batches]
    sources = [b["input_ids"].shape[1] if "input_ids" in b else 1 for b in batches]
    return BatchShape(
        source_length=round(mean(sources)),
        target_length=round(mean(targets)),
    )


def allowed_codecs(links: LinksConfig) -> tuple[str, ...]:
    """The one that the run names, or those that its plans choose from."""
    return name_list(links.codecs) if links.codec == "auto" else (links.codec,)


def execution_of(config: AppConfig) -> Execution:
    """How every stage of the run computes and sends."""
    return Execution(
        precision=config.train.precision,
        recompute=config.train.recompute,
        clip_norm=config.train.clip_norm,
        codec=config.links.codec if config.links.codec != "auto" else "fp32",
        keep_spans=config.train.timeline,
        paced=config.links.pace == "plan",
    )


def optimizer_settings(config: AppConfig, server_round: int) -> OptimizerSettings:
    """The clusters' optimiser in one round, from 1: linear warm-up, then the chosen decay."""
    train, rounds = config.train, config.run.num_server_rounds
    rate = train.learning_rate
    if server_round <= train.warmup_rounds:
        rate *= server_round / train.warmup_rounds
    elif train.decay == "linear":
        rate *= (rounds - server_round + 1) / (rounds - train.warmup_rounds)
    return OptimizerSettings(
        name=train.optimizer,
        learning_rate=rate,
        weight_decay=train.weight_decay,
    )


Tell = Callable[[float], None]
TellScores = Callable[[Mapping[str, float]], None]


def inner_strategy(
    config: AppConfig, task: Task, on_training: Tell, on_evaluation: TellScores
) -> Strategy:
    """The Flower strategy that CollaPipe wraps; it goes on with the clusters that are connected.

    The run as a whole has waited for all of them before.

    ``on_training`` gets the mean training loss of a round, ``on_evaluation`` loss and metrics of
    the clusters on the test set, where the run-config asks them.
    """
    try:
        strategy = _STRATEGIES[config.run.strategy]
    except KeyError as error:
        raise ConfigError(f"strategy must be one of {', '.join(_STRATEGIES)}") from error
    return strategy(
        fraction_evaluate=float(config.evaluation.federated),
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
        train_metrics_aggr_fn=_mean_loss(on_training),
        evaluate_metrics_aggr_fn=_joined_scores(task, on_evaluation),
    )


def _mean_loss(tell: Tell) -> Aggregate:
    """Flower's average of the loss in the replies' metrics, told to ``tell``, too."""

    def mean_loss(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        loss = _weighted_loss([_metrics(reply) for reply in replies], weighted_by)
        tell(loss)
        return MetricRecord({"loss": loss})

    return mean_loss


def _joined_scores(task: Task, tell: TellScores) -> Aggregate:
    """The metrics of all clusters' shares together: their counts are added, not averaged."""

    def joined_scores(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        found = [_metrics(reply) for reply in replies]
        tally = reduce(added, map(read_tally, found))
        joined = scores(task, _weighted_loss(found, weighted_by), tally)
        tell(joined)
        return MetricRecord(dict(joined))

    return joined_scores


def _metrics(reply: RecordDict) -> MetricRecord:
    return next(iter(reply.metric_records.values()))


def _weighted_loss(found: Sequence[MetricRecord], weighted_by: str) -> float:
    counts = [cast(float, metrics[weighted_by]) for metrics in found]
    losses = [cast(float, metrics["loss"]) for metrics in found]
    return fsum(map(mul, losses, counts)) / (fsum(counts) or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The planner of a run, and the energy that each device may spend per round on average."""

    rounds: ScheduledRounds
    energy_budget_j: dict[str, float]


def make_planner(
    config: AppConfig,
    learner: Learner,
    clusters: Mapping[int, ClusterProfile],
    names: Mapping[int, str],
) -> Planned:
    """DSSDA (or the chosen policy) over the simulated world of the described clusters.

    ``names`` are the clusters' by node, as they are at any time.

    Raises ConfigError for unknown names and InfeasibleError when no plan fits the devices.
    """
    settings = SchedulerSettings(
        penalty_weight=config.scheduler.penalty_weight,
        micro_batch_sizes=count_list(config.scheduler.micro_batch_sizes),
        micro_batches=count_list(config.scheduler.micro_batches),
        schedule=config.scheduler.schedule,
        participation_floor=config.scheduler.participation_floor,
        learning_rate=config.train.learning_rate,
        max_model_share=config.scheduler.max_model_share,
        recompute=config.train.recompute,
        codecs=allowed_codecs(config.links),
    )
    model = learner.splitter.profile(learner.shape)
    profiles = sorted(clusters.values(), key=lambda profile: profile.cluster_id)
    world = _world(config, model, profiles)
    with blaming("scheduler.policy"):
        scheduler = make_scheduler(config.scheduler.policy, settings)
    with blaming("world.devices, world.memory-share"):
        scheduler.step(scheduler.init(snapshot := world.snapshot(1, model)), snapshot)
    return Planned(
        rounds=ScheduledRounds(
            scheduler,
            world,
            model,
            names,
            options=settings.options,
            paced=config.links.pace == "plan",
        ),
        energy_budget_j={
            device.device_id: device.energy_budget_j
            for profile in world.clusters
            for device in (profile.control_unit, *profile.devices)
        },
    )


def _world(config: AppConfig, model: ModelProfile, profiles: Sequence[ClusterProfile]) -> World:
    """The described clusters, placed around the edge, with energy budgets to suit the model."""
    budgets = Budgets(model=model, share=config.world.energy_share, radio_s=0.0)
    world = make_world(
        cluster_devices=[[m.kind for m in (p.control_unit, *p.devices)] for p in profiles],
        examples=[profile.examples for profile in profiles],
        cluster_ids=[profile.cluster_id for profile in profiles],
        radio=config.world.radio,
        channel=config.world.channel,
        seed=config.run.seed,
    )
    return replace(world, clusters=tuple(_with_budgets(p, budgets) for p in profiles))


def _with_budgets(profile: ClusterProfile, budgets: Budgets) -> ClusterProfile:
    def budgeted(device: DeviceProfile) -> DeviceProfile:
        return replace(device, energy_budget_j=budgets.of(device, profile.examples))

    return replace(
        profile,
        control_unit=budgeted(profile.control_unit),
        devices=tuple(budgeted(device) for device in profile.devices),
    )
