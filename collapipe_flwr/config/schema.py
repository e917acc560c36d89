"""The run-config as one frozen tree, composed of the dataclasses of the modules that use them.

Flower hands an app a flat mapping such as ``{"train.learning-rate": 0.002}``; :func:`parse` turns
it into an :class:`AppConfig`. A comment beside each field explains its key. The defaults of
:class:`AppConfig` are the demo, and ``pyproject.toml`` repeats them because Flower only lets users
override keys that it finds there (a test keeps both equal).

A new key is a field declared by ``key`` in the class whose code uses it, and a line in
``pyproject.toml``; sections that ``inline`` that class, and what carries it, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from collapipe_flwr.config.parsing import flatten_section, parse_section, refuse_unknown
from collapipe_flwr.config.privacy import PrivacyConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import AUTO as WHERE_BEST
from collapipe_flwr.core.keys import (
    Value,
    above,
    assignments,
    at_least,
    between,
    check_keys,
    compute_name,
    counts,
    inline,
    key,
    matches,
    name_lists,
    off_or_at_least,
    one_of,
    path,
    some_of,
)
from collapipe_flwr.core.links import CODECS, TOP_K, UPDATE_CODECS, Heartbeat, TlsFiles
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.models.spec import PRODUCTS, LoraConfig, ModelConfig
from collapipe_flwr.pipeline.config import CacheConfig, Execution, NoiseConfig
from collapipe_flwr.pipeline.optimizer_settings import OptimizerConfig
from collapipe_flwr.scheduler.protocol import NOISE_SCALE, SchedulerConfig

AUTO = "auto"
SINKS = ("tensorboard", "wandb", "mlflow", "prometheus")
METRICS_ADDRESS = "127.0.0.1:9464"
STRATEGIES = {  # the classes in flwr.serverapp.strategy
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedadam": "FedAdam",
    "fedadagrad": "FedAdagrad",
    "fedyogi": "FedYogi",
    "fedprox": "FedProx",
    "qfedavg": "QFedAvg",
    "fedmedian": "FedMedian",
    "fedtrimmedavg": "FedTrimmedAvg",
    "krum": "Krum",
    "multikrum": "MultiKrum",
    "bulyan": "Bulyan",
    "dp-fixed-clipping": "DifferentialPrivacyServerSideFixedClipping",
    "dp-adaptive-clipping": "DifferentialPrivacyServerSideAdaptiveClipping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The run as a whole (keys without a section)."""

    num_server_rounds: int = key(12, between(1, 1_000_000))
    clusters: int = key(2, at_least(1))  # Flower nodes that take part: partition ids below this
    seed: int = key(7, between(0, 2**63 - 1))
    output_dir: str = key("runs")
    run_name: str = key("")  # folder inside output-dir; empty: named after the start time
    resume: str = key("")  # folder of a run to go on with, from its newest checkpoint
    checkpoint_every: int = key(1, at_least(0))  # rounds; 0: none, so the run cannot be resumed
    strategy: str = key("fedavg", one_of(*STRATEGIES))
    strategy_arguments: str = key("", assignments())  # of the strategy's class
    runtime: str = key("pipeline", one_of("pipeline", "whole"))  # whole: plain FedAvg, no split
    node_timeout_s: float = key(300.0, above(0))  # wait this long for the clusters to connect
    round_timeout_s: float = key(900.0, above(0))
    round_retries: int = key(5, at_least(0))  # of a round in which every cluster failed
    round_slack: float = key(0.0, off_or_at_least(1))  # close at so many times the usual; 0: never
    round_late: str = key("drop", one_of("drop", "join"))  # what comes after a round has closed

    def __post_init__(self) -> None:
        joins_late = self.round_late == "join"
        if self.runtime == "whole" and (self.round_slack or joins_late):
            key = f"round-slack={self.round_slack:g}" if self.round_slack else "round-late=join"
            raise ConfigError(
                f"{key} has no effect with runtime=whole, whose rounds have no predicted duration: "
                "leave it out, or set runtime=pipeline"
            )
        if joins_late and not self.round_slack:
            raise ConfigError(
                "round-late=join has no effect without round-slack: set it, too, to 1.5"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The local training of a cluster in one round; what stages obey is in ``execution``."""

    optimizer: OptimizerConfig = inline(OptimizerConfig(learning_rate=0.002, weight_decay=0.0))
    optimizer_state: str = key("reset", one_of("reset", "keep"))  # of a cluster, between rounds
    state_dir: str = key("")  # for a resumed cluster; state-dir in --node-config goes first
    warmup_rounds: int = key(0, at_least(0))  # the rate grows linearly over these rounds
    decay: str = key("linear", one_of("none", "linear"))  # linear: towards 0 after the last round
    examples_per_round: int = key(960, between(0, 100_000_000))  # of each cluster; 0: all it has
    execution: Execution = inline(Execution())
    compute: str = key(WHERE_BEST, compute_name())  # where; compute in --node-config goes first
    threads: int = key(1, at_least(1))  # torch threads of a cluster's process, and of the server's
    snapshot_every: int = key(0, at_least(0))  # steps that a lost device costs at most; 0: a round

    def __post_init__(self) -> None:
        check_keys(self, "train.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """DSSDA or a baseline, and the grids it searches."""

    policy: str = key("dssda")
    settings: SchedulerConfig = inline(
        SchedulerConfig(
            progress=NOISE_SCALE,
            micro_batch_sizes=(16, 32),
            micro_batches=(2, 4),
            max_model_share=0.5,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """The simulated devices and radio of a laptop run."""

    devices: tuple[tuple[str, ...], ...] = key(
        (
            ("raspberry-pi-4", "jetson-nano", "phone"),
            ("jetson-nano", "raspberry-pi-5", "raspberry-pi-4"),
        ),
        name_lists(),
    )
    control_unit: str = key("raspberry-pi-5")  # of every cluster
    radio: str = key("wifi", one_of("wifi", "5g"))
    channel: str = key("block-fading", one_of("static", "block-fading", "mobility"))
    memory_share: float = key(0.0015, between(1e-6, 1))  # of a preset's memory; small model: small
    energy_share: float = key(0.5, above(0))  # budget: this share of training all blocks alone
    truth_error: float = key(0.0, at_least(0))  # of what plans believe of devices, in ln
    trusted: int = key(0, at_least(0))  # the first so many devices of every cluster
    lora_ranks: tuple[int, ...] = key((), counts(empty=True))  # of clusters; empty: lora.rank

    def __post_init__(self) -> None:
        check_keys(self, "world.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksConfig:
    """What travels between the stages of a cluster, and from it to the server.

    A cluster file may choose the codec between its stages itself.
    """

    codec: str = key("fp32", one_of(*CODECS, AUTO))  # of hidden states and gradients
    codecs: tuple[str, ...] = key(("fp32", "bf16", "int8"), some_of(*CODECS))  # auto: of these
    pace: str = key("none", one_of("none", "plan"))  # plan: senders keep to the planned rates
    updates: str = key(
        "fp32", one_of(*UPDATE_CODECS)
    )  # of a cluster's reply: fp32 sends it exactly

    @property
    def allowed(self) -> tuple[str, ...]:
        """The codec that the run names, or those that its plans choose from."""
        return self.codecs if self.codec == AUTO else (self.codec,)

    @property
    def paced(self) -> bool:
        """Whether senders keep to the planned rates."""
        return self.pace == "plan"


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """The edge server that holds the decoder or head."""

    address: str = key("")  # HOST:PORT of a running one; empty: the ServerApp starts one here
    compute: str = key(WHERE_BEST, compute_name())  # where the one that it starts computes
    certificate_name: str = key("")  # what it must prove under TLS; empty: the host in its address
    tls_ca: Path | None = key(None, path())  # PEM files of this side; empty: plain text
    tls_cert: Path | None = key(None, path())
    tls_key: Path | None = key(None, path())
    timeout_s: float = key(30.0, above(0))  # longest time for the edge or a device to answer
    heartbeat: Heartbeat = inline(Heartbeat())

    def __post_init__(self) -> None:
        check_keys(self, "edge.")

    def tls(self) -> TlsFiles | None:
        """Return the PEM files; None where none is named."""
        files = TlsFiles(ca=self.tls_ca, certificate=self.tls_cert, key=self.tls_key)
        return None if files == TlsFiles() else files


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustConfig:
    """How far a cluster believes its devices."""

    audit_share: float = key(0.0, between(0, 1))  # of replay intervals, see `cluster.audit`


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """The check on unseen examples after a round."""

    every: int = key(1, at_least(1))  # rounds
    batch_size: int = key(64, at_least(1))
    federated: bool = key(False)  # clusters, too, each on its share of the test


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportingConfig:
    """Where rounds are reported besides the run's folder."""

    sinks: tuple[str, ...] = key((), some_of(*SINKS, empty=True))
    metrics: str = key(  # where the sink prometheus is scraped
        METRICS_ADDRESS, matches(r"(.+:)?\d{1,5}", f'must read like "{METRICS_ADDRESS}" or "9464"')
    )
    log_lines: bool = key(False)  # also to the ServerApp's log: `reporting.log_lines`


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """The whole run-config; each field but ``run`` is the section of that name."""

    run: RunConfig = inline(RunConfig())
    data: DataConfig = inline(DataConfig(), table="data")
    model: ModelConfig = inline(ModelConfig(), table="model")
    lora: LoraConfig = inline(LoraConfig(), table="lora")
    train: TrainConfig = inline(TrainConfig(), table="train")
    scheduler: PlannerConfig = inline(PlannerConfig(), table="scheduler")
    world: WorldConfig = inline(WorldConfig(), table="world")
    links: LinksConfig = inline(LinksConfig(), table="links")
    cache: CacheConfig = inline(CacheConfig(), table="cache")
    edge: EdgeConfig = inline(EdgeConfig(), table="edge")
    privacy: PrivacyConfig = inline(PrivacyConfig(), table="privacy")
    noise: NoiseConfig = inline(NoiseConfig(), table="privacy")
    trust: TrustConfig = inline(TrustConfig(), table="trust")
    evaluation: EvaluationConfig = inline(EvaluationConfig(), table="evaluation")
    reporting: ReportingConfig = inline(ReportingConfig(), table="reporting")

    def __post_init__(self) -> None:
        if self.lora.rank and not self.model.pretrained:
            raise ConfigError(
                f"lora.rank is {self.lora.rank}, but model.pretrained is empty: adapters need a "
                "checkpoint below them; name one, or set lora.rank=0"
            )
        if self.lora.aggregate == PRODUCTS:
            self._check_products()
        for name, ranks in (
            ("world.lora-ranks", self.world.lora_ranks),
            ("lora.ranks", self.lora.ranks),
        ):
            most = max(ranks, default=0)
            if most > self.lora.rank or (most and self.lora.aggregate != PRODUCTS):
                raise ConfigError(
                    f"{name} is {','.join(map(str, ranks))} with lora.rank {self.lora.rank} and "
                    f"lora.aggregate {self.lora.aggregate}: clusters of their own ranks need "
                    f"lora.rank={max(most, self.lora.rank)} and lora.aggregate=products"
                )
        if self.links.updates != "fp32" and self.run.runtime == "whole":
            raise ConfigError(
                f"links.updates={self.links.updates} has no effect with runtime=whole, whose "
                "clusters reply exactly: leave it out, or set runtime=pipeline"
            )
        if self.cache.active and self.run.runtime == "whole":
            raise ConfigError(
                f"cache.max-gb={self.cache.max_gb:g} has no effect with runtime=whole, whose "
                "clusters train the unsplit model: leave it out, or set runtime=pipeline"
            )
        if self.trust.audit_share:
            self._check_audits()
        if self.noise.active:
            self._check_noise()
        if not (self.data.tokenizer or self.model.pretrained):
            raise ConfigError(
                "data.tokenizer is empty, which means that of model.pretrained, but that is empty, "
                'too: write "train", a name or a directory'
            )

    def _check_products(self) -> None:
        unfit = {  # a key: whether its value is, and the way out
            "lora.rank": (not self.lora.rank, "there are no adapters then: raise it"),
            "runtime": (self.run.runtime == "whole", "its clients get factors: set pipeline"),
            "round-late": (self.run.round_late == "join", "factors are others by then: set drop"),
            "train.optimizer-state": (
                self.train.optimizer_state == "keep",
                "it is of factors, which are others in every round: set reset",
            ),
            "links.updates": (
                self.links.updates == TOP_K,
                "what it leaves for later rounds is of other factors by then: set int8 or int4",
            ),
        }
        values = flatten(self)
        for name, (is_unfit, why) in unfit.items():
            if is_unfit:
                raise ConfigError(
                    f"{name} is {values[name]!r} beside lora.aggregate=products, but {why}"
                )

    def _check_audits(self) -> None:
        share = f"trust.audit-share={self.trust.audit_share:g}"
        if self.run.runtime == "whole":
            raise ConfigError(
                f"{share} has no effect with runtime=whole, in which no device computes: leave it "
                "out, or set runtime=pipeline"
            )
        if self.scheduler.settings.replicas:
            raise ConfigError(
                f"{share} cannot tell replicas of a stage apart: leave it out, or set "
                "scheduler.replicas=false"
            )

    def _check_noise(self) -> None:
        """Raise ConfigError for what would undo, or cannot be part of, private training."""
        on_gradients = self.noise.on_gradients
        unfit = {  # a key: whether its value is, and why
            "runtime": (self.run.runtime != "pipeline", "only stages clip: set pipeline"),
            "privacy.trusted-blocks": (
                not (on_gradients or self.privacy.trusted_blocks or self.cache.active),
                "noise-on=activations adds noise behind trusted blocks: set 1 or more",
            ),
            "model.frozen-blocks": (
                not on_gradients and self.model.frozen_blocks < max(self.privacy.trusted_blocks, 1),
                "what noise-on=activations leaves uncovered must not train: set "
                f"{max(self.privacy.trusted_blocks, 1)}",
            ),
            "evaluation.federated": (
                not on_gradients and self.evaluation.federated,
                "noise-on=activations covers examples of training alone: set false",
            ),
            "strategy": (
                on_gradients and self.run.strategy == "qfedavg",
                "it weighs by losses of training, which stay on the clusters: choose another",
            ),
            "data.stream": (
                bool(self.data.stream),
                "what is spent is counted for a fixed set of examples: leave it out",
            ),
            "privacy.labels": (
                on_gradients and not self.privacy.labels_at_home,
                "an edge elsewhere sees gradients before their noise: set home",
            ),
            "train.clip-norm": (
                on_gradients and self.train.execution.clip_norm > 0,
                "gradients are clipped already: leave it out",
            ),
        }
        values = flatten(self)
        for name, (is_unfit, why) in unfit.items():
            if is_unfit:
                raise ConfigError(f"{name} is {values[name]!r} beside privacy.clip-norm, but {why}")

    @property
    def largest_batch(self) -> int:
        """The examples of the largest step that a plan may choose."""
        return max(size * count for size, count in self.scheduling.batches)

    @property
    def seeded_data(self) -> DataConfig:
        """The data section with the run's seed, and the checkpoint's tokenizer if none is named."""
        tokenizer = self.data.tokenizer or self.model.pretrained
        return replace(self.data, seed=self.run.seed, tokenizer=tokenizer)

    @property
    def execution(self) -> Execution:
        """How every stage of the run computes and sends; plans may choose other codecs per hop."""
        codec = "fp32" if self.links.codec == AUTO else self.links.codec
        return replace(self.train.execution, codec=codec, paced=self.links.paced)

    def optimizer(self, server_round: int) -> OptimizerConfig:
        """Return the clusters' optimizer in a round, from 1: linear warm-up, then the decay."""
        train, rounds = self.train, self.run.num_server_rounds
        rate = train.optimizer.learning_rate
        if server_round <= train.warmup_rounds:
            rate *= server_round / train.warmup_rounds
        elif train.decay == "linear":
            rate *= (rounds - server_round + 1) / (rounds - train.warmup_rounds)
        return train.optimizer.with_learning_rate(rate)

    @property
    def scheduling(self) -> SchedulerConfig:
        """What the planner may choose, with what it has to know of training and links."""
        settings = self.scheduler.settings
        return replace(
            settings.by_example if self.noise.on_gradients else settings,
            learning_rate=self.train.optimizer.learning_rate,
            recompute=self.train.execution.recompute,
            codecs=self.links.allowed,
            late_slack=self.run.round_slack if self.run.round_late == "join" else 0.0,
        )


def known_keys() -> set[str]:
    """Return every key that a run-config may hold."""
    return set(flatten(AppConfig()))


def parse(values: Mapping[str, Value]) -> AppConfig:
    """Parse a flat run-config; raises ConfigError naming the first key that is wrong."""
    refuse_unknown(values, known_keys())
    return parse_section(AppConfig(), "", values)


def flatten(config: AppConfig) -> dict[str, Value]:
    """Return the flat run-config that parses to ``config``."""
    return flatten_section(config, "")
