"""What a host needs to know to hold one part of one cluster's model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.heartbeat import Heartbeat
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.meter import Span
from collapipe_flwr.pipeline.optimizer import OptimizerSettings

_RANDOM_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """Names a session on its host; whoever knows both may use it."""

    session_id: str
    token: str = field(repr=False)  # a secret: never printed

    @classmethod
    def random(cls, prefix: str) -> SessionKey:
        """A new key that nobody can guess."""
        return cls(
            session_id=f"{prefix}-{secrets.token_hex(4)}", token=secrets.token_hex(_RANDOM_BYTES)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NextHop:
    """Where a device passes its activations on: a session on another host called `name`.

    `certificate_name` is what it must prove under TLS; empty: the host in `address`. `link` is how
    both ends behave. With a `heartbeat` the device notices when the next host falls silent.
    """

    address: str
    key: SessionKey
    name: str = "edge"
    certificate_name: str = ""
    link: LinkConfig = field(default_factory=LinkConfig)
    heartbeat: Heartbeat | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a device holds, and what follows it.

    `blocks` are the first one and the one behind the last. `tx_power_w` is the planned power of the
    device's radio (None: as it is).
    """

    blocks: tuple[int, int]
    next_hop: NextHop
    tx_power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """Opens a session: whoever knows `key` may use it.

    `spec_json` is the model (`ModelSpec.to_json`). The edge, which is last, has no `placement`.
    A `recoverable` session keeps a copy of its last snapshot (at first of the weights that it was
    given) and goes back to it when a stream fails, instead of ending. With `keep_optimizer` a
    device keeps the optimiser's slots with the weights for the next round.

    Members of `cluster_id` may use it; the host writes down which one was its `opener`. Both count
    only where certificates tell callers apart.
    """

    key: SessionKey
    spec_json: str
    stage: StageConfig = field(default_factory=lambda: StageConfig(name="edge"))
    placement: Placement | None = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    keep_optimizer: bool = False
    recoverable: bool = False
    cluster_id: str = ""
    opener: str = ""

    def __post_init__(self) -> None:
        texts = (self.key.session_id, self.key.token)
        if not all(text.isascii() and text.isprintable() for text in texts):
            raise ConfigError("a session's id and token must be printable ASCII characters")


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
