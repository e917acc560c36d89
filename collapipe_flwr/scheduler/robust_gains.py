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
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import PricingOptions

CAUTION = 0.1  # a Rayleigh link is better than this share of its mean nine times out of ten
OFF = 0.01  # error of forecasts, in ln(latency of the round), from which on gains are averaged
FAR_OFF = 0.05  # and from which on plans are cautious, until it is below OFF again
MEMORY = 0.5  # weight of the past in that error
LONGEST_AVERAGE = 20  # rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustGains:
    """How far forecasts erred, and average gains while they do."""

    error: float = 0.0
    careful: bool = False  # plans assume cautious gains
    rounds: int = 0  # in the averages
    average: Mapping[str, ChannelState] = field(default_factory=dict)
    forecast_s: float | None = None  # of the round that runs now, by measured gains


def with_averages(gains: RobustGains, snapshot: Snapshot) -> RobustGains:
    """Fold the round's measured gains in while forecasts are off.

    Raises ScheduleError for a snapshot that cannot be planned with.
    """
    if gains.error <= OFF:
        return RobustGains(error=gains.error)
    tabulate(snapshot)
    rounds = min(gains.rounds + 1, LONGEST_AVERAGE)
    average = {
        c.profile.cluster_id: _mixed(gains.average.get(c.profile.cluster_id), c.channel, rounds)
        for c in snapshot.clusters
    }
    careful = gains.careful or gains.error > FAR_OFF
    return replace(gains, rounds=rounds, average=average, careful=careful)


def robust(gains: RobustGains, snapshot: Snapshot) -> Snapshot:
    """``snapshot`` itself or, when plans are to be careful, with cautious gains on every link."""
    if not gains.careful:
        return snapshot

    def cautious(cluster: ClusterSnapshot) -> ClusterSnapshot:
        average = gains.average[cluster.profile.cluster_id]
        return replace(cluster, channel=_scaled(average, CAUTION))

    return replace(snapshot, clusters=tuple(cautious(c) for c in snapshot.clusters))


def with_forecast(
    gains: RobustGains, plan: Plan, snapshot: Snapshot, options: PricingOptions
) -> RobustGains:
    """What ``plan`` will take by measured gains."""
    if plan.fallback is not None:
        return replace(gains, forecast_s=None)
    if not gains.careful:
        return replace(gains, forecast_s=plan.latency_s)
    return replace(gains, forecast_s=price(plan, snapshot, options).latency_s)


def with_error(gains: RobustGains, outcome: RoundOutcome) -> RobustGains:
    """Compare the forecast with how long the round really took."""
    if gains.forecast_s is None or not outcome.latency_s > 0:
        return replace(gains, forecast_s=None)
    missed = abs(math.log(outcome.latency_s / gains.forecast_s))
    error = MEMORY * gains.error + (1.0 - MEMORY) * missed
    return replace(gains, error=error, forecast_s=None)


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
