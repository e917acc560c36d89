"""The run-config as one frozen tree; what a key means stands beside it.

Flower hands an app a flat mapping such as ``{"train.learning-rate": 0.002}``; :func:`parse`
turns it into an :class:`AppConfig`. The defaults below are the demo, and ``pyproject.toml``
repeats them because Flower only lets users override keys that it finds there (a test keeps
both equal).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collapipe_flwr.core.heartbeat import LEAST_MISSES, LEAST_PERIOD_S, Heartbeat
from collapipe_flwr.core.parsing import (
    Value,
    above,
    assignments,
    at_least,
    between,
    counts,
    key,
    key_names,
    numbers,
    off_or_at_least,
    one_of,
    parse_section,
    read_assignments,
    refuse_unknown,
    some_of,
)
from collapipe_flwr.core.tls_files import TlsFiles

DATA_TASKS = (
    "number-words",
    "classification",
    "token-classification",
    "image-classification",
    "masked-lm",
    "causal-lm",
    "translation",
    "summarisation",
)
LINK_CODECS = ("fp32", "fp16", "bf16", "int8")
_DEMO_MODEL = (
    "d_model=64 encoder_layers=6 decoder_layers=2 encoder_attention_heads=4 "
    "decoder_attention_heads=4 encoder_ffn_dim=128 decoder_ffn_dim=128 "
    "max_position_embeddings=64 scale_embedding=true init_std=0.05 dropout=0.0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The run as a whole (keys without a section)."""

    num_server_rounds: int = key(12, at_least(1))
    clusters: int = key(2, at_least(1))  # Flower nodes that take part: partition ids below this
    seed: int = key(7, at_least(0))
    output_dir: str = "runs"
    run_name: str = ""  # folder inside output-dir; empty: named after the start time
    resume: str = ""  # folder of a run to go on with, from its newest checkpoint
    checkpoint_every: int = key(1, at_least(0))  # rounds; 0: none, so the run cannot be resumed
    strategy: str = key("fedavg", one_of("fedavg", "fedavgm", "fedadam"))
    runtime: str = key("pipeline", one_of("pipeline", "whole"))  # whole: plain FedAvg, no split
    node_timeout_s: float = key(300.0, above(0))  # wait this long for the clusters to connect
    round_timeout_s: float = key(900.0, above(0))
    round_slack: float = key(0.0, off_or_at_least(1))  # close at so many times the usual; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is learnt from: the built-in task, or your own files or hub data set."""

    task: str = key("number-words", one_of(*DATA_TASKS))
    train: str = ""  # csv, json, parquet, txt or conll file (also .gz), folder or hub name
    test: str = ""  # the same; empty: a seeded share of the training data is held out
    text_column: str = "text"
    label_column: str = "label"
    source_column: str = "source"
    target_column: str = "target"
    tokens_column: str = "tokens"  # token-classification: a list of words per row
    tags_column: str = "tags"  # and a tag for each
    label_names: str = ""  # of labels or tags that are numbers, from 0 on: "O B-PER I-PER"
    image_column: str = "image"  # pictures, file names or nested lists of 0 .. 255
    image_size: int = key(32, at_least(1))  # pixels; pictures are resized to a square
    image_channels: int = key(3, one_of(1, 3))  # grey or colour
    image_mean: str = key("0.5", numbers())  # subtracted from 0 .. 1; one, or one per channel
    image_std: str = key("0.5", numbers())
    mask_share: float = key(0.15, between(0, 1))  # masked-lm: tokens to guess
    partition: str = key("auto", one_of("auto", "natural", "iid", "dirichlet"))
    partition_column: str = ""  # what natural and dirichlet go by; empty: the task's choice
    alpha: float = key(0.5, above(0))  # dirichlet: small is more skewed
    tokenizer: str = "train"  # byte-level BPE learnt on the spot; else a folder or hub name
    vocab_size: int = key(384, at_least(260))
    max_source_length: int = key(64, at_least(2))  # causal-lm: tokens of a block
    max_target_length: int = key(64, at_least(2))
    bucketing: str = key("none", one_of("none", "tokens"))  # tokens: micro-batches of like lengths
    stream: str = ""  # folder that grows, STREAM/<cluster number>/FILE; empty: nothing arrives
    stream_replay: float = key(0.5, between(0, 1))  # share of a round drawn from earlier examples
    train_examples: int = key(0, at_least(0))  # 0: all
    test_examples: int = key(0, at_least(0))  # 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The transformer: built from a Hugging Face config, or loaded from a folder or the hub."""

    type: str = "marian"  # a transformers model type; ignored when pretrained is set
    pretrained: str = ""
    overrides: str = key(_DEMO_MODEL, assignments())  # fields of its config; "" keeps them all
    edge_blocks: int = key(0, at_least(0))  # upper blocks that stay at the edge; no decoders
    ties: str = key("untie", one_of("untie", "rows"))  # rows: one table, lent row by row
    shared: str = key("freeze", one_of("freeze", "sum"))  # parameters that every block reads

    @property
    def settings(self) -> dict[str, object]:
        """``overrides`` as a mapping; the default ones shape the demo, never a checkpoint."""
        untouched = bool(self.pretrained) and self.overrides == _DEMO_MODEL
        return {} if untouched else read_assignments(self.overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen checkpoint; only they (and a new head) train and travel."""

    rank: int = key(0, at_least(0))  # 0: train all weights
    alpha: int = key(16, at_least(1))  # adapters count alpha / rank times
    dropout: float = key(0.0, between(0, 0.99))
    target_modules: str = ""  # ends of module names, or all-linear; empty: peft's choice
    modules_to_save: str = ""  # trained in full; empty: the head of a classifier
    frozen_dtype: str = key("float32", one_of("float32", "bfloat16", "int8"))  # in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The local training of a cluster in one round."""

    optimizer: str = key("adamw", one_of("adamw", "sgd"))
    learning_rate: float = key(0.002, above(0))
    weight_decay: float = key(0.0, at_least(0))
    optimizer_state: str = key("reset", one_of("reset", "keep"))  # of a cluster, between rounds
    state_dir: str = ""  # of what a resumed cluster needs; state-dir in --node-config goes first
    warmup_rounds: int = key(0, at_least(0))  # the rate grows linearly over these rounds
    decay: str = key("linear", one_of("none", "linear"))  # linear: towards 0 after the last round
    examples_per_round: int = key(960, at_least(0))  # of each cluster; 0: all it has
    precision: str = key("fp32", one_of("fp32", "bf16"))  # of products; weights stay fp32
    recompute: bool = False  # devices keep less and compute forward passes twice
    clip_norm: float = key(0.0, at_least(0))  # most norm of all gradients together; 0: any
    timeline: bool = False  # write what every stage did when, for Perfetto
    threads: int = key(1, at_least(1))  # torch threads of a cluster's process, and of the server's
    snapshot_every: int = key(0, at_least(0))  # steps that a lost device costs at most; 0: a round


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """DSSDA or a baseline, and the grids it searches."""

    policy: str = "dssda"
    penalty_weight: float = key(1.0, above(0))  # V: latency against energy queues
    micro_batch_sizes: str = key("16,32", counts())
    micro_batches: str = key("2,4", counts())
    schedule: str = key("gpipe", one_of("gpipe", "1f1b"))
    participation_floor: float = key(1.0, between(0, 1))  # long-term share of rounds, each cluster
    max_model_share: float = key(0.5, above(0))  # of the whole model's memory on any device


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """The simulated devices and radio of a laptop run."""

    devices: str = "raspberry-pi-4,jetson-nano,phone;jetson-nano,raspberry-pi-5,raspberry-pi-4"
    control_unit: str = "raspberry-pi-5"  # of every cluster
    radio: str = key("wifi", one_of("wifi", "5g"))
    channel: str = key("block-fading", one_of("static", "block-fading", "mobility"))
    memory_share: float = key(
        0.0015, between(0, 1)
    )  # of a preset's memory; small model, small share
    energy_share: float = key(0.5, above(0))  # budget: this share of training all blocks alone


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksConfig:
    """What travels between the stages of a cluster; a cluster file may choose for itself."""

    codec: str = key("fp32", one_of(*LINK_CODECS, "auto"))  # of hidden states and gradients
    codecs: str = key("fp32,bf16,int8", some_of(*LINK_CODECS))  # auto: the plan chooses per hop
    pace: str = key("none", one_of("none", "plan"))  # plan: senders keep to the planned rates


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """The edge server that holds the decoder or head."""

    address: str = ""  # HOST:PORT of a running one; empty: the ServerApp starts one on loopback
    certificate_name: str = ""  # what it must prove under TLS; empty: the host in its address
    tls_ca: str = ""  # PEM files of this side; empty: plain text
    tls_cert: str = ""
    tls_key: str = ""
    timeout_s: float = key(30.0, above(0))  # longest time for the edge or a device to answer
    heartbeat_s: float = key(2.0, above(LEAST_PERIOD_S))  # how often they show that they live
    heartbeat_misses: int = key(LEAST_MISSES, at_least(LEAST_MISSES))  # that make one lost

    @property
    def heartbeat(self) -> Heartbeat:
        """The two as one value."""
        return Heartbeat(period_s=self.heartbeat_s, misses=self.heartbeat_misses)

    def tls(self) -> TlsFiles | None:
        """The PEM files; None where none is named."""
        if not (self.tls_ca or self.tls_cert or self.tls_key):
            return None
        ca, cert, private = (
            Path(path) if path else None for path in (self.tls_ca, self.tls_cert, self.tls_key)
        )
        return TlsFiles(ca=ca, certificate=cert, key=private)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The check on unseen examples after a round."""

    every: int = key(1, at_least(1))  # rounds
    batch_size: int = key(64, at_least(1))
    federated: bool = False  # clusters, too, each through its own pipeline on its share of the test


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """The whole run-config; each field but ``run`` is the section of that name."""

    run: RunConfig = field(default_factory=RunConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    world: WorldConfig = field(default_factory=WorldConfig)
    links: LinksConfig = field(default_factory=LinksConfig)
    edge: EdgeConfig = field(default_factory=EdgeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


_SECTIONS: dict[str, type] = {
    "run": RunConfig,
    "data": DataConfig,
    "model": ModelConfig,
    "lora": LoraConfig,
    "train": TrainConfig,
    "scheduler": SchedulerConfig,
    "world": WorldConfig,
    "links": LinksConfig,
    "edge": EdgeConfig,
    "evaluation": EvaluationConfig,
}


def _prefix(name: str) -> str:
    return "" if name == "run" else f"{name}."


def known_keys() -> set[str]:
    """Every key that a run-config may hold."""
    return {k for name, section in _SECTIONS.items() for k in key_names(section, _prefix(name))}


def parse(values: Mapping[str, Value]) -> AppConfig:
    """Parse a flat run-config; raises ConfigError naming the first key that is wrong."""
    refuse_unknown(values, known_keys())
    sections: dict[str, Any] = {
        n: parse_section(s, _prefix(n), values) for n, s in _SECTIONS.items()
    }
    return AppConfig(**sections)


def flatten(config: AppConfig) -> dict[str, Value]:
    """The flat run-config that parses to ``config``."""
    return {
        k: getattr(getattr(config, name), f)
        for name, section in _SECTIONS.items()
        for k, f in key_names(section, _prefix(name)).items()
    }


def name_list(text: str) -> tuple[str, ...]:
    """``"fp32, int8"`` as ``("fp32", "int8")``."""
    return tuple(part.strip() for part in text.split(","))


def count_list(text: str) -> tuple[int, ...]:
    """``"4,8"`` as ``(4, 8)``."""
    return tuple(int(part) for part in text.split(","))
