"""What to plan with where measurements are noisy, biased or old: averages, and what rounds showed.

**Profiles.** Speed and energy per operation are averaged in the logarithm, per device, in two
books: what profiles claim (``claimed``) and what devices showed while they worked (``shown``). A
device that worked is planned with what it showed, because training is a better measurement of
training than any benchmark before it. A value that differs from its average by more than a factor
of two is a change (throttling, another load), not noise: that average starts again there, and a
claim that moves so far also outdates what was shown.

**Gains.** Channels really change and are not averaged, unless old measurements of them forecast
badly. Every round is forecast from the gains that were measured. While rounds take as long as
forecast, measurements are trusted and nothing else happens. Once they are off, measurements are
averaged, link by link; and once they are far off, plans assume ``CAUTION`` times the average on
every link, until measurements forecast well again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import is_

from collapipe_flwr.core.domain import ChannelState, DeviceProfile, Plan, RoundOutcome, Snapshot
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import PricingOptions

CHANGE = math.log(2.0)
SHOWN_MEMORY = 0.5  # weight of the past in what devices show: a round averages over many steps
Pair = tuple[float, float]
"""ln speed, ln energy per operation."""
Averages = Mapping[str, Mapping[str, Pair]]
"""cluster -> device -> pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEstimates:
    """What is known about the devices besides today's profiles."""

    claimed: Averages = field(default_factory=dict)
    shown: Averages = field(default_factory=dict)


def with_profiles(
    snapshot: Snapshot, estimates: ProfileEstimates, memory: float
) -> tuple[Snapshot, ProfileEstimates]:
    """The snapshot with estimated devices, and the estimates after it.

    ``memory`` is the weight of the past in claims; 0 leaves everything as it is. Unusable numbers
    pass through, so that the planner can refuse them.
    """
    if memory <= 0.0:
        return snapshot, ProfileEstimates()
    claimed, shown = _copied(estimates.claimed), _copied(estimates.shown)
    clusters = []
    for cluster in snapshot.clusters:
        old = cluster.profile
        books = claimed.setdefault(old.cluster_id, {}), shown.get(old.cluster_id, {})
        profile = old.with_members(partial(_planned, books=books, memory=memory))
        same = all(map(is_, profile.members, old.members))
        clusters.append(cluster if same else replace(cluster, profile=profile))
    after = ProfileEstimates(claimed=claimed, shown=shown)
    return replace(snapshot, clusters=tuple(clusters)), after


def _planned(
    device: DeviceProfile, *, books: tuple[dict[str, Pair], dict[str, Pair]], memory: float
) -> DeviceProfile:
    """The device as it is planned with, its claim noted; itself where nothing differs."""
    name, speed, joule = device.device_id, device.speed_flop_per_s, device.energy_per_flop_j
    if not (_usable(speed) and _usable(joule)):
        return device
    claimed, shown = books
    fresh = (math.log(speed), math.log(joule))
    before = claimed.get(name, fresh)
    if before != fresh and _apart(before, fresh) > CHANGE:
        shown.pop(name, None)
    claimed[name] = fresh if before == fresh else _blend(before, fresh, memory)
    mean = shown.get(name, claimed[name])
    if mean == fresh or _apart(mean, fresh) < 1e-12:
        return device
    return replace(device, speed_flop_per_s=math.exp(mean[0]), energy_per_flop_j=math.exp(mean[1]))


def profiles_learned(estimates: ProfileEstimates, outcome: RoundOutcome) -> ProfileEstimates:
    """Fold in what devices showed in a round; whoever measured nothing changes nothing."""
    shown = _copied(estimates.shown)
    for cluster in outcome.clusters:
        known = shown.setdefault(cluster.cluster_id, {})
        for device, speed in (cluster.speed_flop_per_s or {}).items():
            joule = (cluster.energy_per_flop_j or {}).get(device, math.nan)
            if _usable(speed) and _usable(joule):
                fresh = (math.log(speed), math.log(joule))
                known[device] = _blend(known.get(device, fresh), fresh, SHOWN_MEMORY)
    return replace(estimates, shown=shown)


def _blend(old: Pair, new: Pair, memory: float) -> Pair:
    """The moving average of both, started again where a value has changed."""
    mean = [
        fresh if abs(fresh - past) > CHANGE else memory * past + (1.0 - memory) * fresh
        for fresh, past in zip(new, old, strict=True)
    ]
    return mean[0], mean[1]


def _apart(one: Pair, other: Pair) -> float:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))


def _usable(value: float) -> bool:
    return 0 < value < math.inf


def _copied(averages: Averages) -> dict[str, dict[str, Pair]]:
    return {cluster: dict(devices) for cluster, devices in averages.items()}


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

    averages = (gains.average[c.profile.cluster_id] for c in snapshot.clusters)
    cautious = tuple(
        replace(cluster, channel=_each_gain(lambda gain: CAUTION * gain, average))
        for cluster, average in zip(snapshot.clusters, averages, strict=True)
    )
    return replace(snapshot, clusters=cautious)


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
    return _each_gain(lambda before, now: (1.0 - weight) * before + weight * now, old, new)


def _each_gain(change: Callable[..., float], *channels: ChannelState) -> ChannelState:
    """``change`` of every gain of ``channels`` of one shape."""
    rows = zip(*(channel.d2d_gain for channel in channels), strict=True)
    return ChannelState(
        d2d_gain=tuple(tuple(map(change, *row)) for row in rows),
        edge_gain=tuple(map(change, *(channel.edge_gain for channel in channels))),
    )
