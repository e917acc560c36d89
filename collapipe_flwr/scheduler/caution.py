"""Old channel measurements: notice that they forecast badly, and plan with cautious gains then.

Every round is forecast from the gains that were measured. While rounds take as long as forecast,
measurements are trusted and nothing else happens. Once they are off, measurements are averaged,
link by link; and once they are far off, plans assume ``CAUTION`` times the average on every link,
until measurements forecast well again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from collapipe_flwr.core.domain import ChannelState, ClusterSnapshot, Plan, RoundOutcome, Snapshot
from collapipe_flwr.costs.compute import Options
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import tabulate

CAUTION = 0.1  # a Rayleigh link is better than this share of its mean nine times out of ten
OFF = 0.01  # error of forecasts, in ln(latency of the round), from which on gains are averaged
FAR_OFF = 0.05  # and from which on plans are cautious, until it is below OFF again
MEMORY = 0.5  # weight of the past in that error
LONGEST_AVERAGE = 20  # rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """How far forecasts erred, and average gains while they do."""

    error: float = 0.0
    careful: bool = False  # plans assume cautious gains
    rounds: int = 0  # in the averages
    average: Mapping[str, ChannelState] = field(default_factory=dict)
    forecast_s: float | None = None  # of the round that runs now, by measured gains


def averaged(doubt: Doubt, snapshot: Snapshot) -> Doubt:
    """Fold the round's measured gains in while forecasts are off.

    Raises ScheduleError for a snapshot that cannot be planned with.
    """
    if doubt.error <= OFF:
        return Doubt(error=doubt.error)
    tabulate(snapshot)
    rounds = min(doubt.rounds + 1, LONGEST_AVERAGE)
    average = {
        c.profile.cluster_id: _mixed(doubt.average.get(c.profile.cluster_id), c.channel, rounds)
        for c in snapshot.clusters
    }
    careful = doubt.careful or doubt.error > FAR_OFF
    return replace(doubt, rounds=rounds, average=average, careful=careful)


def believed(doubt: Doubt, snapshot: Snapshot) -> Snapshot:
    """``snapshot`` itself or, when plans are to be careful, with cautious gains on every link."""
    if not doubt.careful:
        return snapshot

    def cautious(cluster: ClusterSnapshot) -> ClusterSnapshot:
        average = doubt.average[cluster.profile.cluster_id]
        return replace(cluster, channel=_scaled(average, CAUTION))

    return replace(snapshot, clusters=tuple(cautious(c) for c in snapshot.clusters))


def forecast(doubt: Doubt, plan: Plan, snapshot: Snapshot, options: Options) -> Doubt:
    """What ``plan`` will take by measured gains."""
    if plan.fallback is not None:
        return replace(doubt, forecast_s=None)
    if not doubt.careful:
        return replace(doubt, forecast_s=plan.latency_s)
    return replace(doubt, forecast_s=price(plan, snapshot, options).latency_s)


def judged(doubt: Doubt, outcome: RoundOutcome) -> Doubt:
    """Compare the forecast with how long the round really took."""
    if doubt.forecast_s is None or not outcome.latency_s > 0:
        return replace(doubt, forecast_s=None)
    missed = abs(math.log(outcome.latency_s / doubt.forecast_s))
    error = MEMORY * doubt.error + (1.0 - MEMORY) * missed
    return replace(doubt, error=error, forecast_s=None)


def _mixed(old: ChannelState | None, new: ChannelState, rounds: int) -> ChannelState:
    if old is None or len(old.edge_gain) != len(new.edge_gain):
        return new
    weight = 1.0 / rounds
    d2d = zip(old.d2d_gain, new.d2d_gain, strict=True)
    return ChannelState(
        d2d_gain=tuple(_row(one, other, weight) for one, other in d2d),
        edge_gain=_row(old.edge_gain, new.edge_gain, weight),
    )


def _row(old: tuple[float, ...], new: tuple[float, ...], weight: float) -> tuple[float, ...]:
    return tuple((1.0 - weight) * a + weight * b for a, b in zip(old, new, strict=True))


def _scaled(channel: ChannelState, factor: float) -> ChannelState:
    return ChannelState(
        d2d_gain=tuple(tuple(factor * g for g in row) for row in channel.d2d_gain),
        edge_gain=tuple(factor * g for g in channel.edge_gain),
    )
