"""Configuration of stages, and the requests by which hosts hold them.

`Execution` and `StageConfig` are passed unchanged from the order of a round to the stage that uses
them: by reference within a process, as JSON in a `SessionRequest`. A new option needs a field here,
the code that uses it and its documentation.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from typing import Annotated

from collapipe_flwr.core import bounds
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.keys import at_least, between, check_keys, key, one_of
from collapipe_flwr.core.links import CODECS, Heartbeat, LinkConfig
from collapipe_flwr.core.schedule import ALONE, ReplicaIndex
from collapipe_flwr.pipeline.optimizer_settings import OptimizerConfig

PRECISIONS = ("fp32", "bf16")
LONGEST_WAIT_S = 86_400.0
MOST_SEED = 2**53
GRADIENTS, ACTIVATIONS = "gradients", "activations"  # what noise covers
_RANDOM_BYTES = 16
_LONGEST_KEY = 500  # characters of a session's id or token
_LONGEST_NAME = 80  # of names that a peer chooses, in logs and counters


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Options of every stage of a run, besides its schedule.

    ``precision`` bf16 computes matrix products in bfloat16 (torch's autocast) on weights, gradients
    and optimizer state that stay in single precision. ``recompute`` is activation checkpointing:
    for a micro-batch in flight devices keep only the inputs of their blocks (or of the whole part
    where blocks are unknown). ``clip_norm`` bounds the norm of all gradients together (0: not at
    all); it is read by the first stage, which tells the others. ``check_finite`` ends the step at
    the first stage that makes finite numbers infinite or NaN. ``codec`` is for hidden states and
    gradients on links for which the plan chose none. ``paced`` limits senders to the planned rates.
    ``keep_spans`` records a timeline.
    """

    precision: str = key("fp32", one_of(*PRECISIONS))
    recompute: bool = key(False)
    clip_norm: float = key(0.0, at_least(0))
    check_finite: bool = key(False)
    codec: str = "fp32"
    keep_spans: bool = key(False, name="timeline")
    paced: bool = False

    def __post_init__(self) -> None:
        check_keys(self, "")

    @property
    def without_recompute(self) -> Execution:
        """These options for the first and the last stage, which keep their activations."""
        return replace(self, recompute=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What control units keep of frozen lower blocks (`cluster.front_cache`): up to ``max_gb``.

    With 0 devices hold these blocks and compute them at every visit. Kept are hidden states in a
    ``codec``. Frozen blocks that drop in training are refused, or computed without dropout if that
    is ``off``.
    """

    max_gb: float = key(0.0, at_least(0))
    codec: str = key("fp32", one_of(*CODECS))
    dropout: str = key("refuse", one_of("refuse", "off"))

    def __post_init__(self) -> None:
        check_keys(self, "cache.")

    @property
    def active(self) -> bool:
        """Whether anything is kept."""
        return self.max_gb > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseConfig:
    """Example-level differential privacy, of what a cluster returns or of what its devices see.

    Every example's gradient is clipped to the norm ``clip_norm``, and noise of ``noise_multiplier``
    times that is added to a step's sum (`private_gradients`). With ``noise_on`` activations so are
    every example's hidden states behind the trusted blocks (`private_activations`). Both are 0
    without privacy. A cluster takes no step that would lead its account beyond ``max_epsilon`` (0:
    no limit) at ``delta``.
    """

    noise_on: str = key(GRADIENTS, one_of(GRADIENTS, ACTIVATIONS))
    clip_norm: float = key(0.0, at_least(0))
    noise_multiplier: float = key(0.0, at_least(0))
    delta: float = key(1e-5, between(1e-15, 0.5))
    max_epsilon: float = key(0.0, at_least(0))

    def __post_init__(self) -> None:
        check_keys(self, "privacy.")
        if bool(self.clip_norm) is not bool(self.noise_multiplier):
            raise ConfigError(
                f"privacy.clip-norm is {self.clip_norm:g} and privacy.noise-multiplier "
                f"{self.noise_multiplier:g}, but one protects nothing without the other: set both, "
                "or neither"
            )
        others = {"max-epsilon": f"{self.max_epsilon:g}", "noise-on": self.noise_on}
        for name, unset in (("max-epsilon", "0"), ("noise-on", GRADIENTS)):
            if others[name] != unset and not self.clip_norm:
                raise ConfigError(
                    f"privacy.{name}={others[name]} has no effect without privacy.clip-norm and "
                    "privacy.noise-multiplier: set them, too"
                )

    @property
    def active(self) -> bool:
        """Whether anything is clipped and noised."""
        return self.clip_norm > 0

    @property
    def on_gradients(self) -> bool:
        """Whether gradients are."""
        return self.active and self.noise_on == GRADIENTS

    @property
    def on_activations(self) -> bool:
        """Whether hidden states are."""
        return self.active and self.noise_on == ACTIVATIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplePrivacy:
    """Clipping and noise of private gradients; every micro-batch is one example.

    Each group of parameters is clipped to ``group_norm``. The noise of a sum over examples has the
    standard deviation ``deviation`` and is drawn from the order's ``secret`` (hexadecimal).
    """

    group_norm: float
    deviation: float
    secret: Annotated[str, bounds.most_entries(_LONGEST_KEY)] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationNoise:
    """What becomes of hidden states behind the first ``behind`` blocks of devices, or of a stage.

    Those of each example are clipped to ``norm``; ``deviation`` is that of the noise of every
    number, which is drawn from the ``secret`` of the order (hexadecimal).
    """

    behind: bounds.Count
    norm: float
    deviation: float
    secret: Annotated[str, bounds.most_entries(_LONGEST_KEY)] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """Options of one stage.

    `depth` is the number of micro-batches in flight before the first backward pass. `deadline_s`
    bounds each wait inside a step, `pause_s` those between steps or texts. `seed` makes dropout
    independent of the cut (`randomness`); the first stage's is used by the whole chain and should
    change from round to round. `turn` is the place among the replicas of the stage.
    """

    name: bounds.Text
    schedule: str = "gpipe"
    depth: int = 1
    deadline_s: float = 60.0
    idle_s: float = 600.0
    seed: int | None = None
    execution: Execution = field(default_factory=Execution)
    turn: ReplicaIndex = ALONE
    privacy: ExamplePrivacy | None = None  # of training; None: gradients are as they are
    activations: ActivationNoise | None = None  # that this stage adds
    audited: bool = False  # its report has `FrameNotes`

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < MOST_SEED:
            raise ConfigError(f"a seed must be >= 0 and below 2**53, got {self.seed}")
        if not all(0 < seconds <= LONGEST_WAIT_S for seconds in (self.deadline_s, self.idle_s)):
            raise ConfigError(
                f"deadlines of a stage must be > 0 and <= {LONGEST_WAIT_S:g} s, got "
                f"{self.deadline_s} and {self.idle_s}"
            )

    @property
    def pause_s(self) -> float:
        """`idle_s`, but at least `deadline_s`: stages ahead may still run the last step."""
        return max(self.idle_s, self.deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """Identifies a session on its host; a caller needs both to use it."""

    session_id: Annotated[str, bounds.most_entries(_LONGEST_KEY)]
    token: Annotated[str, bounds.most_entries(_LONGEST_KEY)] = field(
        repr=False
    )  # a secret: never printed

    @classmethod
    def draw(cls, prefix: str) -> SessionKey:
        """Draw a new key from a cryptographic source."""
        return cls(
            session_id=f"{prefix}-{secrets.token_hex(4)}", token=secrets.token_hex(_RANDOM_BYTES)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NextHop:
    """The session that a device sends its activations to, on a host called `name`.

    Under TLS that host's certificate must be for `certificate_name`; empty: the host in `address`.
    `link` configures both ends. With a `heartbeat` the device detects that the next host is lost.
    """

    address: bounds.Address
    key: SessionKey
    name: bounds.Text = "edge"
    certificate_name: bounds.Text = ""
    link: LinkConfig = field(default_factory=LinkConfig)
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The blocks of a device, and its connections.

    `blocks` are the first one and the one behind the last. Where the next stage has replicas,
    micro-batches take `next_hops` in turn; where this stage has, `sibling` is the previous replica.
    `tx_power_w` is the planned power of the device's radio (None: unchanged).
    """

    blocks: tuple[int, int]
    next_hops: tuple[NextHop, ...]
    tx_power_w: float | None = None
    sibling: NextHop | None = None

    def __post_init__(self) -> None:
        if not self.next_hops:
            raise ConfigError("a placement without a next hop")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """Opens a session that callers with `key` may use.

    `spec_json` describes the model. The edge, which is last, has no `placement`. With
    `keep_optimizer` the host keeps the optimizer state with the weights for the next round.

    Where certificates identify callers, members of `cluster_id` may use it, and the host records
    its `opener`.
    """

    key: SessionKey
    spec_json: str
    stage: StageConfig = field(default_factory=lambda: StageConfig(name="edge"))
    placement: Placement | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    keep_optimizer: bool = False
    cluster_id: bounds.Text = ""
    opener: bounds.Text = ""
    run_id: bounds.Text = ""  # for logs and counters only
    server_round: bounds.Count = 0
    attempt: bounds.Count = 0  # the number of the order, by which its progress is told

    @property
    def cluster(self) -> str:
        """The cluster whose stage it is; a device's name begins with it."""
        return (self.stage.name.rpartition("/")[0] or self.cluster_id)[:_LONGEST_NAME]

    @property
    def part(self) -> str:
        """A description of the part of the model that it holds."""
        if self.placement is None:
            return "the last part of a model"
        first, stop = self.placement.blocks
        return f"blocks {first} to {stop - 1}"

    @property
    def about(self) -> dict[str, object]:
        """The fields of log records about it."""
        known = {"run": self.run_id[:_LONGEST_NAME], "round": self.server_round or None}
        return {**known, "cluster": self.cluster, "session": self.key.session_id}

    def __post_init__(self) -> None:
        texts = (self.key.session_id, self.key.token)
        if not all(text.isascii() and text.isprintable() for text in texts):
            raise ConfigError("a session's id and token must be printable ASCII characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassesDone:
    """Micro-batches of an order that were completed so far, in training and in evaluation."""

    attempt: int = 0  # the order's number
    trained: int = 0
    tested: int = 0

    def __add__(self, later: PassesDone) -> PassesDone:
        """Add them up if they are of the same order; else the later ones count."""
        if self.attempt != later.attempt:
            return later
        trained, tested = self.trained + later.trained, self.tested + later.tested
        return PassesDone(attempt=self.attempt, trained=trained, tested=tested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The load of a host: `sessions` held, `running` of them with an open stream.

    Of the `most_bytes` that models may take, `held_bytes` are reserved.
    """

    sessions: int
    running: int
    most_sessions: int
    held_bytes: int = 0
    most_bytes: int = 0
