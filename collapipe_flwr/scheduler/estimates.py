"""Estimates of devices whose profiles are noisy, biased or old, from averages and measured rounds.

**Claims.** Speed and energy per operation of profiles are averaged in the logarithm, per device. A
claim that differs from its average by more than a factor of two is a change (another load, another
benchmark), not noise: the average starts again there, and what the device showed is outdated.

**Shown.** Devices that worked are planned with what they showed, because training is a better
measurement of training than any benchmark before it. Four things are learnt, each by a `LogFilter`:

    seconds of a micro-batch = passes x overhead + FLOP / speed       every member, and the edge
    watts while computing = claimed watts x share                     where a sensor showed them
    peak bytes = planned bytes x share                                every device
    latency of a round = what the cost model explains
        + starts x overhead, of the control unit and of a device      every cluster of machines

The device is the slowest that works. To begin and to end a round is much work in small pieces, so
it takes a machine as long as to start so many blocks, whatever it does in between: about
``USUAL_STARTS``, which is what plans assume until a round was measured.

While samples agree with the claims to within ``AGREES``, they make these only more certain, and
plans are bit-equal to those without samples. A device without work for ``PATIENCE`` rounds is
planned with its claim again, so that a device that was slow is tried again. The estimate then
continues from the claim or the old estimate, whichever is nearer to the next sample, so one round
suffices. The patience doubles whenever the old estimate was right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from operator import is_
from typing import TypeVar

from collapipe_flwr.core.domain import (
    ClusterProfile,
    ClusterSnapshot,
    DeviceProfile,
    EdgeProfile,
    Snapshot,
)
from collapipe_flwr.core.outcome import ClusterOutcome, RoundOutcome, StageSample
from collapipe_flwr.costs.measured import EDGE
from collapipe_flwr.scheduler.log_filter import STEP, LogFilter, Prior

CHANGE = math.log(2.0)
AGREES = 0.02  # in ln
PATIENCE = 10  # rounds
MEMORY = 0.8  # weight of the past in averages of claims
MOST_MEMORY_SHARE = 2.0  # a false reading of peak bytes halves a device at worst
# Starting the operations of a block, forward and backward, takes about a millisecond, of which
# claims of speed know nothing.
USUAL_OVERHEAD_S = 1e-3
USUAL_SHARE = 0.3  # of a first sample's seconds that is overhead, at most
USUAL_STARTS = 100.0  # of a block: docs/results/anatomy/slowed.json has medians of 99 and 95
STAGE = Prior(own=(1.5, 0.3), common=1.0)
WATT = Prior(own=(1.0,))
BYTES = Prior(own=(0.3,))
ROUND = Prior(own=(0.0, 1.0, 1.0))
AS_CLAIMED = LogFilter(mean=(0.0,))  # a device's power where none was metered
UNSEEN_ROUND = LogFilter(mean=(0.0, math.log(USUAL_STARTS), math.log(USUAL_STARTS)))
UNIT = ""  # no device has this name

T = TypeVar("T")
Claim = tuple[float, float, float]
"""ln speed, ln energy per operation, seconds of overhead."""
Averages = Mapping[str, Mapping[str, Claim]]
"""cluster -> device -> claim."""
Filters = Mapping[str, Mapping[str, LogFilter]]
"""cluster -> device -> filter; the snapshot's edge is ``EDGE`` of ``EDGE``, a cluster's own is
its id of the cluster, which is ``EDGE`` where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileEstimates:
    """Knowledge about devices besides today's profiles.

    ``start_s`` are the seconds that starting a block takes the members of clusters of machines, by
    their claims: cluster -> member -> seconds, the control unit's under ``UNIT``.
    """

    claimed: Averages = field(default_factory=dict)
    stages: Filters = field(default_factory=dict)
    watts: Filters = field(default_factory=dict)
    memories: Filters = field(default_factory=dict)
    rounds: Mapping[str, LogFilter] = field(default_factory=dict)
    start_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def estimate_profiles(
    snapshot: Snapshot, estimates: ProfileEstimates
) -> tuple[Snapshot, ProfileEstimates]:
    """Return the snapshot with estimated devices, and the estimates after it.

    Unusable numbers pass through, so that the planner can refuse them.
    """
    after = _note_claims(snapshot, estimates)
    clusters = tuple(_estimate_cluster(cluster, after) for cluster in snapshot.clusters)
    starts = {c.profile.cluster_id: _claim_starts(c.profile) for c in snapshot.clusters}
    after = replace(after, start_s={name: known for name, known in starts.items() if known})
    clusters = tuple(_add_rounds(cluster, after) for cluster in clusters)
    edge = _estimate_edge(snapshot.edge, after)
    if edge is snapshot.edge and all(map(is_, clusters, snapshot.clusters)):
        return snapshot, after
    return replace(snapshot, clusters=clusters, edge=edge), after


def _note_claims(snapshot: Snapshot, estimates: ProfileEstimates) -> ProfileEstimates:
    """Note today's claims and forget what they outdate."""
    claimed, outdated = _copy(estimates.claimed), set()
    for cluster_id, name, fresh in _list_claims(snapshot):
        claims = claimed.setdefault(cluster_id, {})
        before = claims.get(name, fresh)
        if _measure_distance(before, fresh) > CHANGE:
            outdated.add((cluster_id, name))
        same = before[:2] == fresh[:2]
        claims[name] = fresh if same else _blend(before, fresh)
    return replace(
        estimates,
        claimed=claimed,
        stages=_drop(estimates.stages, outdated),
        watts=_drop(estimates.watts, outdated),
    )


def _list_claims(snapshot: Snapshot) -> Iterator[tuple[str, str, Claim]]:
    """List cluster, device and claim of everyone with usable numbers, the edge included."""
    edge = snapshot.edge
    if _is_usable(edge.speed_flop_per_s):
        yield EDGE, EDGE, (math.log(edge.speed_flop_per_s), 0.0, edge.overhead_s)
    for cluster in snapshot.clusters:
        for own in cluster.profile.edges:
            if _is_usable(own.speed_flop_per_s):
                claim = (math.log(own.speed_flop_per_s), 0.0, own.overhead_s)
                yield cluster.profile.cluster_id, own.id, claim
        for d in cluster.profile.members:
            if _is_usable(d.speed_flop_per_s) and _is_usable(d.energy_per_flop_j):
                logs = math.log(d.speed_flop_per_s), math.log(d.energy_per_flop_j)
                yield cluster.profile.cluster_id, d.device_id, (*logs, d.overhead_s)


def _estimate_cluster(cluster: ClusterSnapshot, estimates: ProfileEstimates) -> ClusterSnapshot:
    old = cluster.profile
    members = [_estimate_device(old.cluster_id, estimates, member) for member in old.members]
    edge = old.edge and _estimate_edge(old.edge, estimates, old.cluster_id)
    if edge is old.edge and all(map(is_, members, old.members)):
        return cluster
    profile = replace(old, control_unit=members[0], devices=tuple(members[1:]), edge=edge)
    return replace(cluster, profile=profile)


def _add_rounds(cluster: ClusterSnapshot, estimates: ProfileEstimates) -> ClusterSnapshot:
    """Add to a cluster of machines the overheads of its rounds: learnt, or the usual ones."""
    cluster_id = cluster.profile.cluster_id
    start_s = estimates.start_s.get(cluster_id)
    if start_s is None:
        return cluster
    _, of_unit, of_device = estimates.rounds.get(cluster_id, UNSEEN_ROUND).values
    devices = tuple(
        replace(device, round_s=of_device * start_s[device.device_id])
        for device in cluster.profile.devices
    )
    profile = replace(cluster.profile, devices=devices, overhead_s=of_unit * start_s[UNIT])
    return replace(cluster, profile=profile)


def _claim_starts(profile: ClusterProfile) -> dict[str, float]:
    """Return seconds of starting a block, as claimed: rounds of one size cannot tell them."""
    if not profile.real_links:
        return {}
    starts = {d.device_id: d.overhead_s or USUAL_OVERHEAD_S for d in profile.devices}
    return {**starts, UNIT: profile.control_unit.overhead_s or USUAL_OVERHEAD_S}


def _estimate_device(
    cluster_id: str, estimates: ProfileEstimates, device: DeviceProfile
) -> DeviceProfile:
    """Return the device to plan with; itself where nothing differs."""
    name, speed, joule = device.device_id, device.speed_flop_per_s, device.energy_per_flop_j
    claim = _look_up(estimates.claimed, cluster_id, name)
    if claim is None or not (_is_usable(speed) and _is_usable(joule)):
        return device
    claim = (*claim[:2], device.overhead_s)
    device = _scale_memory(device, _look_up(estimates.memories, cluster_id, name))
    stage = _find_believed(_look_up(estimates.stages, cluster_id, name), claim)
    power = _look_up(estimates.watts, cluster_id, name) or AS_CLAIMED
    if (
        stage is None
        and power.mean == (0.0,)
        and _measure_distance(claim, (math.log(speed), math.log(joule), device.overhead_s)) < 1e-12
    ):
        return device
    overhead_s, per_flop_s = (claim[2], math.exp(-claim[0])) if stage is None else stage.values
    watt = math.exp(claim[0] + claim[1]) * power.values[0]
    return replace(
        device,
        speed_flop_per_s=1.0 / per_flop_s,
        overhead_s=overhead_s,
        energy_per_flop_j=watt * per_flop_s,
    )


def _estimate_edge(
    edge: EdgeProfile, estimates: ProfileEstimates, place: str = EDGE
) -> EdgeProfile:
    claim = _look_up(estimates.claimed, place, edge.id)
    stage = claim and _find_believed(_look_up(estimates.stages, place, edge.id), claim)
    if not stage:
        return edge
    overhead_s, per_flop_s = stage.values
    return replace(edge, speed_flop_per_s=1.0 / per_flop_s, overhead_s=overhead_s)


def _find_believed(stage: LogFilter | None, claim: Claim) -> LogFilter | None:
    """Return the learned values, or None if missing or stale."""
    if stage is None or _is_old(stage) or stage.mean == _make_unseen_mean(claim):
        return None
    return stage


def _is_old(stage: LogFilter) -> bool:
    return stage.unseen >= PATIENCE << stage.looks


def _scale_memory(device: DeviceProfile, known: LogFilter | None) -> DeviceProfile:
    """Lower the memory where devices need more than planned; never raise it."""
    if known is None or known.mean[0] <= 0.0:
        return device
    share = min(known.values[0], MOST_MEMORY_SHARE)
    return replace(device, memory_bytes=int(device.memory_bytes / share))


def learn_profiles(estimates: ProfileEstimates, outcome: RoundOutcome) -> ProfileEstimates:
    """Fold in the measurements of a round; parties without measurements keep their estimates."""
    stages, watts = _copy(estimates.stages), _copy(estimates.watts)
    memories, rounds = _copy(estimates.memories), dict(estimates.rounds)
    for cluster in outcome.clusters:
        stages[cluster.cluster_id] = _age(stages.get(cluster.cluster_id, {}), cluster)
        for sample in cluster.stages:
            place = _find_place(estimates, cluster.cluster_id, sample)
            claim = _look_up(estimates.claimed, place, sample.device_id)
            if claim is None:
                continue
            _learn_stage(stages.setdefault(place, {}), sample, claim)
            if sample.watt is not None:
                claimed_w = math.exp(claim[0] + claim[1])
                _learn_share(watts, place, sample, (claimed_w, sample.watt), WATT)
            if sample.planned_bytes > 0:
                seen = (float(sample.planned_bytes), float(sample.peak_bytes))
                _learn_share(memories, place, sample, seen, BYTES)
        slowest_s = _find_slowest_start_s(cluster, estimates)
        if cluster.measured and cluster.explained_s and slowest_s:
            parts = (cluster.explained_s, estimates.start_s[cluster.cluster_id][UNIT], slowest_s)
            known = estimates.rounds.get(cluster.cluster_id, UNSEEN_ROUND)
            rounds[cluster.cluster_id] = known.observe(parts, cluster.latency_s, ROUND)
    return replace(estimates, stages=stages, watts=watts, memories=memories, rounds=rounds)


def expect_s(estimates: ProfileEstimates, cluster_id: str, sample: StageSample) -> float | None:
    """Estimate the seconds of a micro-batch; None where nothing is known."""
    place = _find_place(estimates, cluster_id, sample)
    claim = _look_up(estimates.claimed, place, sample.device_id)
    if claim is None:
        return None
    known = _find_believed(_look_up(estimates.stages, place, sample.device_id), claim)
    if known is not None:
        return known.expect((sample.passes, sample.flop))
    return _compute_claimed_s(claim, sample)


def _find_place(estimates: ProfileEstimates, cluster_id: str, sample: StageSample) -> str:
    """Return who knows a stage: its cluster, or `EDGE` for an edge that is not the cluster's."""
    is_edge = sample.device_id == EDGE
    own = _look_up(estimates.claimed, cluster_id, EDGE) is not None
    return EDGE if is_edge and not own else cluster_id


def _compute_claimed_s(claim: Claim, sample: StageSample) -> float:
    return sample.passes * claim[2] + sample.flop * math.exp(-claim[0])


def bound_plausible_j(
    spent_j: Mapping[str, float], planned_j: Mapping[str, float]
) -> dict[str, float]:
    """Return energies by device as queues count them; an unusable number counts as planned.

    Of a device that was planned to spend some, no more counts than a filter's `STEP` allows.
    """
    found = {}
    for name, spent in spent_j.items():
        planned, most = planned_j.get(name, 0.0), math.exp(STEP)
        usable = 0 <= spent < math.inf
        if planned > 0:
            spent = min(max(spent, planned / most), most * planned)
        found[name] = spent if usable else planned
    return found


def _age(known: Mapping[str, LogFilter], cluster: ClusterOutcome) -> dict[str, LogFilter]:
    """Age the filters of a cluster that have no sample by one round."""
    seen = {sample.device_id for sample in cluster.stages}
    return {name: f if name in seen else f.skip() for name, f in known.items()}


def _make_unseen_mean(claim: Claim) -> tuple[float, float]:
    """Return the mean that is believed of a stage before any sample."""
    return math.log(claim[2] or USUAL_OVERHEAD_S), -claim[0]


def _guess_first(claim: Claim, sample: StageSample) -> LogFilter:
    """Guess a stage at a first sample: unless claimed, overhead is the lesser part of its time."""
    most_s = USUAL_SHARE * sample.busy_s / sample.passes
    overhead_s = claim[2] or min(USUAL_OVERHEAD_S, most_s)
    return LogFilter(mean=(math.log(overhead_s), -claim[0]))


def _learn_stage(book: dict[str, LogFilter], sample: StageSample, claim: Claim) -> None:
    name, parts = sample.device_id, (sample.passes, sample.flop)
    unseen, claimed_s = LogFilter(mean=_make_unseen_mean(claim)), _compute_claimed_s(claim, sample)
    known = book.get(name, unseen)
    error = known.compute_error(parts, sample.busy_s)
    if error is None:
        return
    if known.mean == unseen.mean:
        if claimed_s > 0 and abs(math.log(sample.busy_s / claimed_s)) <= AGREES:
            certain = known.observe(parts, known.expect(parts), STAGE)
            book[name] = replace(certain, mean=unseen.mean)
            return
        known = replace(known, mean=_guess_first(claim, sample).mean)
    elif _is_old(known):
        guess = _guess_first(claim, sample)
        in_vain = abs(error) <= abs(guess.compute_error(parts, sample.busy_s) or 0.0)
        known = replace(known, looks=known.looks + 1) if in_vain else guess
    book[name] = known.observe(parts, sample.busy_s, STAGE)


def _learn_share(
    books: dict[str, dict[str, LogFilter]],
    place: str,
    sample: StageSample,
    seen: tuple[float, float],
    prior: Prior,
) -> None:
    """Learn which share of the expected value was seen; ``seen`` is (expected, seen)."""
    expected, value = seen
    book = books.setdefault(place, {})
    known = book.get(sample.device_id, LogFilter(mean=(0.0,)))
    error = known.compute_error((expected,), value)
    if error is not None:
        agrees = known.mean == (0.0,) and abs(error) <= AGREES
        book[sample.device_id] = known.observe((expected,), expected if agrees else value, prior)


def _find_slowest_start_s(cluster: ClusterOutcome, estimates: ProfileEstimates) -> float:
    """Return the start of the slowest device that worked; 0 if one had not worked before.

    A first round loads libraries and fills caches, and is no measure.
    """
    known = estimates.stages.get(cluster.cluster_id, {})
    if not all(s.device_id in known for s in cluster.stages if s.device_id != EDGE):
        return 0.0
    start_s = estimates.start_s.get(cluster.cluster_id, {})
    return max((start_s.get(sample.device_id, 0.0) for sample in cluster.stages), default=0.0)


def _blend(old: Claim, new: Claim) -> Claim:
    """Update the moving averages of speed and energy, starting again where a value has changed."""
    speed, joule = (
        fresh if abs(fresh - past) > CHANGE else MEMORY * past + (1.0 - MEMORY) * fresh
        for fresh, past in zip(new[:2], old[:2], strict=True)
    )
    return speed, joule, new[2]


def _measure_distance(one: Claim, other: Claim) -> float:
    return max(abs(one[0] - other[0]), abs(one[1] - other[1]))


def _is_usable(value: float) -> bool:
    return 0 < value < math.inf


def _look_up(book: Mapping[str, Mapping[str, T]], cluster_id: str, name: str) -> T | None:
    return book.get(cluster_id, {}).get(name)


def _copy(book: Mapping[str, Mapping[str, T]]) -> dict[str, dict[str, T]]:
    return {cluster: dict(devices) for cluster, devices in book.items()}


def _drop(
    book: Mapping[str, Mapping[str, T]], gone: Set[tuple[str, str]]
) -> dict[str, dict[str, T]]:
    return {
        cluster: {name: value for name, value in devices.items() if (cluster, name) not in gone}
        for cluster, devices in book.items()
    }
