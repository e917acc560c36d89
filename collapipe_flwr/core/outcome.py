"""What a round came to: the measurements from which schedulers learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Mean squared gradient norms of small (micro-) batches and of whole ones.

    ``*_examples`` are the sizes b for which the mean is |G|^2 + sigma^2 / b: where sizes differ,
    with means weighted by their squares, sum b^2 / sum b.
    """

    small_examples: float
    small_square_norm: float
    big_examples: float
    big_square_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """The planned and the measured rate of a real link in one round.

    ``ends`` are as those of a `LinkRate`, in chain order. Rates are means over both directions by
    time: that of as many bytes there as back.
    """

    ends: tuple[str, str]
    planned_bit_per_s: float
    measured_bit_per_s: float
    paced: bool = False  # senders kept to the plan, so a faster link cannot be seen


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSample:
    """The computing of a member, or of the edge (``device_id`` is its id), in one round.

    ``flop``, ``passes`` and ``busy_s`` are means over micro-batches, forward and backward together;
    ``passes`` counts blocks, each as 1 (4/3 with activation checkpointing), as `DeviceProfile`'s
    overhead does. ``watt`` is the power while computing, None without a sensor. ``expected_s`` and
    ``planned_bytes`` (peak memory) are by the plan.
    """

    device_id: str
    passes: float
    flop: float
    busy_s: float
    expected_s: float | None = None
    watt: float | None = None
    planned_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOutcome:
    """The measurements of one cluster's round; None where nothing was measured.

    ``measured`` says that ``latency_s`` is by the clock of machines, not of a simulated world.
    ``explained_s`` is the time by the cost model with stages as they were measured, and with links
    as estimated after the round. ``metered`` lists the members whose energy is by a sensor; that of
    others is modelled from measured times.
    """

    cluster_id: str
    latency_s: float
    energy_j: Mapping[str, float]  # by device id, the control unit included
    loss: float | None = None
    gradient_noise: GradientNoise | None = None
    links: tuple[LinkSample, ...] = ()
    stages: tuple[StageSample, ...] = ()
    explained_s: float | None = None
    measured: bool = False
    metered: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """Distances that the model moved in a round; None where they were not measured.

    With x the update of the global model in this round and y that of the round before: ``norm`` is
    |x|, ``change_norm`` is |x - y|, and ``spread`` the example-weighted mean of |x_m - x|^2 over
    the clusters' own updates x_m.
    """

    norm: float | None = None
    change_norm: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spared:
    """What a control unit did not compute again of its frozen blocks in a round.

    ``hits`` of ``visits`` of examples found their hidden states kept.
    """

    hits: int = 0
    visits: int = 0
    seconds: float = 0.0
    joules: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """Time and energy of a round, measured by clusters of machines and simulated for others.

    Schedulers update their estimates from it. ``queues_j`` are their energy queues after that, by
    cluster and device, ``spared`` is by cluster.
    """

    round_index: int = 0
    latency_s: float | None = None  # None where nothing was priced
    clusters: tuple[ClusterOutcome, ...] = ()
    movement: Movement = Movement()
    queues_j: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    spared: Mapping[str, Spared] = field(default_factory=dict)

    @property
    def energy_j(self) -> dict[str, Mapping[str, float]]:
        """Joules by cluster and device."""
        return {cluster.cluster_id: cluster.energy_j for cluster in self.clusters}
