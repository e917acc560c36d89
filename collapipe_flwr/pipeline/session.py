"""What a host needs to know to hold one part of one cluster's model."""

from __future__ import annotations

from dataclasses import dataclass, field

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.heartbeat import Heartbeat
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.pipeline.execution import check_precision
from collapipe_flwr.pipeline.meter import Span
from collapipe_flwr.pipeline.optimizer import OptimizerSettings

LONGEST_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextHop:
    """Where a device passes its activations on: a session on another host called `name`.

    `certificate_name` is what it must prove under TLS; empty: the host in `address`.

    With a `heartbeat` the device notices by itself when the next host falls silent.
    """

    address: str
    session_id: str
    token: str
    name: str = "edge"
    certificate_name: str = ""
    link: LinkConfig = field(default_factory=LinkConfig)
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """Opens a session: whoever knows `session_id` and `token` may use it.

    `spec_json` is the model (`ModelSpec.to_json`). A device has `blocks` (first, stop) and a
    `next_hop`; the edge, which is last, has neither. `schedule`, `depth` and what follows as in
    `StageSettings`. A `recoverable` session keeps a copy of its last snapshot (at first of the
    weights that it was given) and goes back to it when a stream fails, instead of ending.
    With `keep_optimizer` a device keeps the optimiser's slots with the weights for the next round.
    `tx_power_w` is the planned power of a device's radio.

    Members of `cluster_id` may use it; the host writes down which one was its `opener`. Both count
    only where certificates tell callers apart.
    """

    session_id: str
    token: str
    spec_json: str
    name: str = "edge"
    blocks: tuple[int, int] | None = None
    next_hop: NextHop | None = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    schedule: str = "gpipe"
    depth: int = 1
    deadline_s: float = 60.0
    idle_s: float = 600.0
    recompute: bool = False
    precision: str = "fp32"
    keep_spans: bool = False
    keep_optimizer: bool = False
    recoverable: bool = False
    tx_power_w: float | None = None
    cluster_id: str = ""
    opener: str = ""

    def __post_init__(self) -> None:
        if not all(text.isascii() and text.isprintable() for text in (self.session_id, self.token)):
            raise ConfigError("a session's id and token must be printable ASCII characters")
        check_precision(self.precision)
        if not all(0 < seconds <= LONGEST_WAIT_S for seconds in (self.deadline_s, self.idle_s)):
            raise ConfigError(
                f"deadlines of a session must be > 0 and <= {LONGEST_WAIT_S:g} s, got "
                f"{self.deadline_s} and {self.idle_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """A moment between two steps: `step` of them were done since the weights were set."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The first single spans of a session, if it was opened with `keep_spans`."""

    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How a host feels: `sessions` held, `running` of them in the middle of a stream.

    It has reserved `held_bytes` of the `most_bytes` that it may hold of models.
    """

    sessions: int
    running: int
    most_sessions: int
    held_bytes: int = 0
    most_bytes: int = 0
