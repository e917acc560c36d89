"""Channel gains to plan with: measured ones, unless those that were measured forecast badly.

Channels really change and are not averaged, unless old measurements of them forecast badly. Every
round is forecast from the gains that were measured. While rounds take as long as forecast,
measurements are trusted and nothing else happens. Once they are off, measurements are averaged,
link by link; and once they are far off, plans assume ``CAUTION`` times the average on every link,
until measurements forecast well again. A round whose devices were not as fast as believed
(``ClusterOutcome.explained_s``) is compared with what their measured speeds make of it. Of real
machines' rounds gains say nothing: their links are learnt from what they carried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from collapipe_flwr.core.domain import (
    ChannelState,
    ClusterSnapshot,
    Plan,
    Snapshot,
)
from collapipe_flwr.core.outcome import RoundOutcome
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
    """The error of forecasts, and average gains while forecasts are off."""

    error: float = 0.0
    careful: bool = False  # plans assume cautious gains
    rounds: int = 0  # in the averages
    average: Mapping[str, ChannelState] = field(default_factory=dict)
    forecast_s: Mapping[str, float] = field(default_factory=dict)
    """What each cluster of the round that runs now was to take, by measured gains."""


def average_gains(gains: RobustGains, snapshot: Snapshot) -> RobustGains:
    """Fold the round's measured gains in while forecasts are off.

    Raises ScheduleError for a snapshot that cannot be planned with.
    """
    if gains.error <= OFF:
        return RobustGains(error=gains.error)
    tabulate(snapshot)
    rounds = min(gains.rounds + 1, LONGEST_AVERAGE)
    average = {
        _name_place(c): _mix(gains.average.get(_name_place(c)), c.channel, rounds)
        for c in snapshot.clusters
    }
    careful = gains.careful or gains.error > FAR_OFF
    return replace(gains, rounds=rounds, average=average, careful=careful)


def make_robust(gains: RobustGains, snapshot: Snapshot) -> Snapshot:
    """Put cautious gains on every link when plans are to be careful; else return ``snapshot``."""
    if not gains.careful:
        return snapshot

    averages = (gains.average[_name_place(c)] for c in snapshot.clusters)
    cautious = tuple(
        replace(cluster, channel=_map_gains(lambda gain: CAUTION * gain, average))
        for cluster, average in zip(snapshot.clusters, averages, strict=True)
    )
    return replace(snapshot, clusters=cautious)


def forecast_round(
    gains: RobustGains, plan: Plan, snapshot: Snapshot, options: PricingOptions
) -> RobustGains:
    """Forecast how long ``plan`` will take by measured gains."""
    if plan.fallback is not None:
        return replace(gains, forecast_s={})
    clusters = price(plan, snapshot, options).clusters if gains.careful else plan.clusters
    return replace(gains, forecast_s={c.cluster_id: c.latency_s for c in clusters})


def measure_error(gains: RobustGains, outcome: RoundOutcome) -> RobustGains:
    """Compare the forecast with how long the round really took.

    Of clusters that ended in it: one that failed, or is late from an earlier round, counts in
    neither.
    """
    ended = [c for c in outcome.clusters if c.cluster_id in gains.forecast_s]
    latency_s = max((c.latency_s for c in ended), default=0.0)
    if any(cluster.measured for cluster in ended) or not 0 < latency_s < math.inf:
        return replace(gains, forecast_s={})
    expected_s = (c.explained_s or gains.forecast_s[c.cluster_id] for c in ended)
    missed = abs(math.log(latency_s / max(expected_s)))
    error = MEMORY * gains.error + (1.0 - MEMORY) * missed
    return replace(gains, error=error, forecast_s={})


def _name_place(cluster: ClusterSnapshot) -> str:
    """Return the cluster's id, with that of its edge if there are several."""
    return f"{cluster.profile.cluster_id} {cluster.profile.edge_id}".rstrip()


def _mix(old: ChannelState | None, new: ChannelState, rounds: int) -> ChannelState:
    if old is None or len(old.edge_gain) != len(new.edge_gain):
        return new
    weight = 1.0 / rounds
    return _map_gains(lambda before, now: (1.0 - weight) * before + weight * now, old, new)


def _map_gains(change: Callable[..., float], *channels: ChannelState) -> ChannelState:
    """Apply ``change`` to every gain of ``channels`` of one shape."""
    rows = zip(*(channel.d2d_gain for channel in channels), strict=True)
    return ChannelState(
        d2d_gain=tuple(tuple(map(change, *row)) for row in rows),
        edge_gain=tuple(map(change, *(channel.edge_gain for channel in channels))),
    )
