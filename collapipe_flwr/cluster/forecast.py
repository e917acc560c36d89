"""Forecasts without a run: the costs of a model's pieces, and the plan for a cluster."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from collapipe_flwr.core.domain import ClusterPlan, ClusterProfile, ModelProfile
from collapipe_flwr.core.errors import ConfigError, InfeasibleError
from collapipe_flwr.core.hub import CONFIG, expand_home
from collapipe_flwr.models.checkpoint import read_pretrained_config
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.families import FAMILIES
from collapipe_flwr.models.profile import TimedBlock, profile_model, time_block
from collapipe_flwr.models.spec import BatchShape, LoraConfig
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.scheduler.edges import divide_memory
from collapipe_flwr.scheduler.link_estimates import apply_links, begin_links
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.world import make_world, with_some_edge

_LABELS = 2  # of a head of unknown size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """A model by folder, hub name or type, and its task ("": the usual one of its type)."""

    model: str
    task: str = ""
    overrides: dict[str, object]
    shape: BatchShape
    edge_blocks: int = 0
    lora_rank: int = 0
    frozen_dtype: str = "float32"
    ties: str = "untie"
    only_shapes: bool = False  # of a checkpoint: its weights are not read


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Costs per example, and a plan with times per round, or the ``refusal`` if there is none."""

    model_type: str
    task: str
    profile: ModelProfile
    measured: TimedBlock | None
    cluster: ClusterProfile | None = None
    plan: ClusterPlan | None = None
    refusal: str = ""

    @property
    def parameter_bytes(self) -> int:
        pieces = (self.profile.embedding, *self.profile.blocks, self.profile.decoder)
        return sum(piece.parameter_bytes for piece in pieces)

    @property
    def verdict(self) -> str:
        """Whether it fits, in one sentence."""
        name = f"{self.model_type} for {self.task} ({len(self.profile.blocks)} blocks)"
        if self.cluster is None:
            block = max(
                b.state_bytes + b.stash_bytes + b.passing_bytes for b in self.profile.blocks
            )
            return (
                f"{name}: a device needs at least {block / 1e6:.1f} MB to train the largest block "
                "on one example; name a cluster by --cluster or --devices to see a plan"
            )
        if self.plan is None:
            return f"{name} does not fit: {self.refusal}"
        return f"{name} fits {self.cluster.cluster_id}: {_describe_plan(self.plan, self.cluster)}"


def build_model(request: ModelChoice) -> Splitter:
    """Build the model, without weights; raises ModelError or ConfigError."""
    known_type = request.model in CONFIG_MAPPING and not Path(request.model).is_dir()
    if not known_type and (request.only_shapes or not _has_weights(request.model)):
        model_type, values = _read_shape(request.model)
        request = replace(request, model=model_type, overrides={**values, **request.overrides})
        known_type = True
    task = request.task or _find_usual_task(request.model, known_type)
    tokens: dict[str, Any] = {}
    if known_type and task == "seq2seq":  # a tokenizer knows them; their values affect no cost
        tokens = {"pad_token_id": 0, "decoder_start_token_id": 0}
    spec = make_spec(
        task,
        model_type=request.model if known_type else None,
        pretrained=None if known_type else request.model,
        overrides=request.overrides,
        num_labels=_LABELS if known_type and task.endswith("classification") else None,
        edge_blocks=request.edge_blocks,
        ties=request.ties,
        **tokens,
        lora=LoraConfig(rank=request.lora_rank, frozen_dtype=request.frozen_dtype)
        if request.lora_rank
        else None,
    )
    if spec.lora and spec.pretrained is None:
        # Only a checkpoint's weights are frozen, in a type of their own; a profile reads none.
        spec = replace(spec, pretrained=request.model)
    splitter = Splitter(spec)
    longest = max(request.shape.source_length, request.shape.target_length)
    if (most := splitter.most_tokens) is not None and longest > most:
        raise ConfigError(f"--length {longest} is more than the model's {most} positions")
    return splitter


def _has_weights(model: str) -> bool:
    """Return whether a folder holds weights; True for a hub name."""
    path = expand_home(model)
    if path.is_dir():
        return any(file.suffix in (".safetensors", ".bin") for file in path.iterdir())
    return not path.is_file()


def _read_shape(model: str) -> tuple[str, dict[str, object]]:
    """Read the type and the settings of a configuration: a file, a folder's, or the hub's."""
    path = expand_home(model)
    if path.is_file() or (path / CONFIG).is_file():
        file = path if path.is_file() else path / CONFIG
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"MODEL: {file} is no configuration ({error})") from error
    else:
        values = read_pretrained_config(model).to_dict()
    model_type = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"MODEL: {model} names no model_type that transformers knows, but {model_type!r}; "
            "give a config.json as transformers saves it"
        )
    known = set(CONFIG_MAPPING[model_type]().to_dict()) - {"model_type", "architectures", "dtype"}
    return model_type, {key: value for key, value in values.items() if key in known}


def _find_usual_task(model: str, known_type: bool) -> str:
    model_type = model if known_type else read_pretrained_config(model).model_type
    if model_type not in FAMILIES:
        raise ConfigError(f"model type {model_type!r} has no usual task: give --task")
    return FAMILIES[model_type].tasks[0]


def forecast(
    splitter: Splitter,
    shape: BatchShape,
    cluster: ClusterProfile | None,
    settings: SchedulerConfig,
    *,
    examples_at_once: int = 8,
    seconds: float = 1.0,
) -> Forecast:
    """Compute costs, time a block (for ``seconds``; 0: not at all), and plan for ``cluster``."""
    profile = profile_model(splitter, shape)
    measured = None
    if seconds > 0:
        measured = time_block(
            splitter, profile.blocks[0], examples=examples_at_once, seconds=seconds
        )
    plan, refusal = None, ""
    try:
        plan = None if cluster is None else plan_first_round(cluster, profile, settings)
    except InfeasibleError as error:
        refusal = str(error)
    return Forecast(
        model_type=splitter.spec.model_type,
        task=splitter.spec.task,
        profile=profile,
        measured=measured,
        cluster=cluster,
        plan=plan,
        refusal=refusal,
    )


def plan_first_round(
    cluster: ClusterProfile, profile: ModelProfile, settings: SchedulerConfig
) -> ClusterPlan:
    """Plan the first round for unlimited energy and a steady channel; raises InfeasibleError."""
    world = make_world(
        cluster_devices=[[member.kind for member in cluster.members]],
        examples=[cluster.examples],
        cluster_ids=[cluster.cluster_id],
    )
    cluster = divide_memory(with_some_edge(cluster), profile)
    cluster = cluster.with_members(lambda member: replace(member, energy_budget_j=math.inf))
    world = replace(world, clusters=(cluster,))
    scheduler = make_scheduler("dssda", settings)
    told = world.snapshot(1, profile)
    snapshot = apply_links(told, begin_links({}, told))
    plan, _ = scheduler.step(scheduler.init(snapshot), snapshot)
    found = plan.find_cluster(cluster.cluster_id)
    assert found is not None, "one cluster alone always takes part"
    return found


def _describe_plan(plan: ClusterPlan, cluster: ClusterProfile) -> str:
    memory = {device.device_id: device.memory_bytes for device in cluster.devices}
    used = {name: size for name, size in plan.memory_bytes.items() if name in memory}
    fullest = max(used, key=lambda name: used[name] / memory[name])
    segments = []
    for segment in plan.segments:
        first, last = segment.first_block, segment.stop_block - 1
        names = " and ".join(name.rpartition("/")[2] for name in segment.device_ids)
        segments.append(
            f"{names} {f'block {first}' if first == last else f'blocks {first}-{last}'}"
        )
    assert plan.whole_bytes and plan.fullest_share, "every planner sets them"
    allowed = "" if plan.model_share is None else f" ({100 * plan.model_share:.3g} % allowed)"
    return (
        f"{', '.join(segments)}; {plan.micro_batches} micro-batches of {plan.micro_batch_size}, a "
        f"round of {cluster.examples} examples takes about {plan.latency_s:.1f} s; the planned "
        f"peak of the fullest device ({fullest.rpartition('/')[2]}) is {used[fullest] / 1e6:.0f} "
        f"of {memory[fullest] / 1e6:.0f} MB allowed, and that of every device at most "
        f"{100 * plan.fullest_share:.0f} % of the {plan.whole_bytes / 1e6:.0f} MB that training "
        f"the whole model takes{allowed}"
    )
