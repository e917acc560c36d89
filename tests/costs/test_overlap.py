"""The price of rounds whose devices begin and end one by one, against other ways to reckon it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapipe_flwr.core.replay import StepTimes, replay
from collapipe_flwr.core.schedule import Op, stage_actions, textbook_depths, turns
from collapipe_flwr.costs.chain import chain_of, step_times
from collapipe_flwr.costs.layouts import planned_codecs, rows_of_plans
from collapipe_flwr.costs.overlap import WeightTimes, overlapped_s
from collapipe_flwr.costs.price import achieved_times, planned_powers, price
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import hand_out_s
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.simulation.setting import Setting, preset

SETTINGS = {
    "defaults": Setting(clusters=5, devices=4),
    **{name: preset(name) for name in ("paper", "one-strong", "cellular")},
}
TINY = StepTimes(
    stage_s=((1.0, 3.0, 5.0, 1.0), (2.0, 4.0, 6.0, 1.0)),
    hop_s=((1.0, 1.0, 1.0), (2.0, 2.0, 2.0)),
)
WEIGHTS = WeightTimes(out_s=(10.0, 20.0), back_s=(30.0, 40.0))


def test_one_step_of_one_micro_batch_by_hand() -> None:
    """The second device has its weights after 10 + 20 and one activation's second."""
    begins = 31.0  # the first device ended at 10 + 1 + 1 + 3, its activation arrived at 16
    second_ends = begins + 5 + 1 + 1 + 1 + 2 + 6
    first_ends = second_ends + 2 + 4
    assert first_ends < second_ends + 40
    collected = second_ends + 40 + 30 + 2  # and one gradient meanwhile
    for half_duplex in (False, True):
        times = replace(TINY, half_duplex=half_duplex)
        assert overlapped_s(times, (1,) * 4, 1, 1.0, WEIGHTS) == collected


def test_two_steps_of_one_micro_batch_by_hand() -> None:
    first_step = 31.0 + 5 + 1 + 1 + 1 + 2 + 6 + 2 + 4 + 2 + 2
    second_ends = 1 + 1 + 3 + 1 + 5 + 1 + 1 + 1 + 2 + 6  # of the last step
    collected = second_ends + 40 + 30 + 2
    assert overlapped_s(TINY, (1,) * 4, 1, 2.0, WEIGHTS) == first_step + collected
    step = second_ends + 2 + 4 + 2 + 2
    assert overlapped_s(TINY, (1,) * 4, 1, 5.0, WEIGHTS) == first_step + 3 * step + collected


def test_what_is_quickly_collected_ends_with_the_step() -> None:
    quick = replace(WEIGHTS, back_s=(1.0, 1.0))
    step = replay(TINY, (1,) * 4, 1).makespan_s
    passes = step - (1 + 1 + 3 + 1)  # from the second device's first pass on
    assert overlapped_s(TINY, (1,) * 4, 1, 2.0, quick) == 31.0 + passes + step


def _in_turn(
    jobs: Sequence[tuple[float, float]], busy: Sequence[tuple[float, float]]
) -> list[float]:
    """Ends of (first possible begin, seconds), one after the other, that make way for ``busy``."""
    now, ends = 0.0, []
    for begin, left in jobs:
        now = max(now, begin)
        for start, stop in sorted(busy):
            if now + left <= start:
                break
            if stop > now:
                left -= max(start - now, 0.0)
                now = stop
        now += left
        ends.append(now)
    return ends


def _simulated_s(
    times: StepTimes,
    depths: Sequence[int],
    count: int,
    steps: int,
    weights: WeightTimes,
    optimiser_s: Sequence[float],
) -> float:
    """A whole round by relaxation, until no time changes any more.

    Shares no code with `replay`. Steps follow each other on every device, no device waits for
    others between them, and the control unit sends weights whenever it has no activations to send.
    """
    workers = [(k, turn) for k, of in enumerate(times.replicas) for turn in turns(of)]
    together = [[i for i, (s, _) in enumerate(workers) if s == k] for k, _ in enumerate(depths)]
    last = len(times.replicas) - 1
    ended: defaultdict[tuple[int, Op, int, int], float] = defaultdict(float)  # stage, op, step, m
    sent: dict[
        tuple[int, Op, int, int], tuple[float, float]
    ] = {}  # begin and end: hop, op, step, m
    stepped: defaultdict[tuple[int, int], float] = defaultdict(float)  # worker, step
    while True:
        before = dict(ended), dict(sent), dict(stepped)

        def busy(op: Op) -> list[tuple[float, float]]:
            """When the first hop carries something."""
            return [span for (hop, way, _, _), span in sent.items() if (hop, way) == (0, op)]

        first = times.replicas[1]
        shares = [(0.0, sum(weights.out_s[:first])), (0.0, sum(weights.out_s[first:]))]
        soon, late = _in_turn(shares, busy(Op.FORWARD))
        ready = [0.0, *(soon,) * first, *(late,) * (len(weights.out_s) - first), 0.0]
        for number, (k, turn) in enumerate(workers):
            now = ready[number]
            for n in range(steps):
                for op, m in stage_actions("1f1b", depths[k], count, turn):
                    source = k - 1 if op is Op.FORWARD else k
                    _, there = sent.get((source, op, n, m), (0.0, 0.0))
                    now = ended[k, op, n, m] = max(now, there) + times.stage_s[op][number]
                stepped[number, n] = now + optimiser_s[k]
                now = max(stepped[other, n] for other in together[k])
        for hop in range(last):
            for op in Op:
                stage = hop if op is Op.FORWARD else hop + 1
                asked = sorted(
                    (ended[stage, op, n, m], n, m) for n in range(steps) for m in range(count)
                )
                # The weights of the first stage go before all activations.
                now = sum(weights.out_s[:first]) if (hop, op) == (0, Op.FORWARD) else 0.0
                for at, n, m in asked:
                    begin = max(now, at)
                    now = begin + times.hop_s[op][hop]
                    sent[hop, op, n, m] = begin, now
        if before == (ended, sent, stepped):
            break
    done = [max(stepped[i, steps - 1] for i in group) for group in together]
    jobs = [(done[k], weights.back_s[k - 1]) for k in range(last - 1, 0, -1)]
    return max(*stepped.values(), *_in_turn(jobs, busy(Op.BACKWARD)))


shapes = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(lambda r: (1, *r, 1))


def _drawn(
    seed: int, replicas: tuple[int, ...], count: int
) -> tuple[StepTimes, WeightTimes, tuple[int, ...]]:
    """Times, weights that take up to ten times as long, and depths that block nowhere."""
    rng = np.random.default_rng(seed)

    def draw(size: int, scale: float = 1.0) -> tuple[float, ...]:
        return tuple((rng.choice([0.1, 1.0], size) * rng.uniform(0.1, scale, size)).tolist())

    workers, hops = sum(replicas), len(replicas) - 1
    ahead, back = draw(hops), draw(hops)
    if max(replicas) > 1:  # which may overtake each other, and so delay others, where links queue
        ahead, back = (ahead[0], *(0.0,) * (hops - 1)), (0.0,) * hops
    times = StepTimes(
        stage_s=(draw(workers), draw(workers)), hop_s=(ahead, back), replicas=replicas
    )
    weights = WeightTimes(out_s=draw(workers - 2, 10.0), back_s=draw(hops - 1, 10.0))
    slack = int(rng.integers(0, 3))
    depths = tuple(min(depth, count) for depth in textbook_depths(replicas, slack))
    return times, weights, (count,) * len(replicas) if rng.random() < 0.3 else depths


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6), replicas=shapes, count=st.integers(3, 7), steps=st.integers(1, 3)
)
def test_no_simulated_round_ends_later_than_its_price(
    seed: int, replicas: tuple[int, ...], count: int, steps: int
) -> None:
    times, weights, depths = _drawn(seed, replicas, count)
    optimiser_s = np.random.default_rng(seed).uniform(0.0, 0.1, len(replicas)).tolist()
    found = _simulated_s(times, depths, count, steps, weights, optimiser_s)
    priced = overlapped_s(times, depths, count, float(steps), weights)
    assert found <= (priced + steps * sum(optimiser_s)) * (1 + 1e-12)


@settings(max_examples=80)
@given(seed=st.integers(0, 10**6), replicas=shapes, count=st.integers(3, 7))
def test_a_round_of_one_step_costs_little_more_than_it_takes(
    seed: int, replicas: tuple[int, ...], count: int
) -> None:
    """What the control unit may send and receive in between, and its own passes ahead of that."""
    times, weights, depths = _drawn(seed, replicas, count)
    found = _simulated_s(times, depths, count, 1, weights, (0.0,) * len(replicas))
    between_s = count * (times.hop_s[0][0] + times.hop_s[1][0] + times.stage_s[0][0])
    assert overlapped_s(times, depths, count, 1.0, weights) <= (found + between_s) * (1 + 1e-12)


def _most_s(
    pass_s: Sequence[float], hop_s: Sequence[float], depths: Sequence[int], count: int
) -> float:
    """The longest way of as many micro-batches as stages have in flight, in one direction."""
    longest, machine_s = 0.0, 0.0
    for stage_s, link_s, depth in zip(pass_s, (*hop_s, 0.0), depths, strict=True):
        machine_s = max(machine_s, stage_s, link_s)
        longest = max(longest, (min(depth, count) - 1) * machine_s)
    return sum(pass_s) + sum(hop_s) + longest


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    devices=st.integers(1, 4),
    count=st.integers(1, 8),
    steps=st.integers(1, 3),
)
def test_overlap_gains_no_more_than_the_first_and_the_last_passes(
    seed: int, devices: int, count: int, steps: int
) -> None:
    """Before the last device has its weights a stage does at most as many as it has in flight."""
    times, weights, depths = _drawn(seed, (1,) * (devices + 2), count)
    ahead, back = (
        _most_s(*part, depths, count) for part in zip(times.stage_s, times.hop_s, strict=True)
    )
    out_s, back_s = sum(weights.out_s), sum(weights.back_s)
    plain = out_s + back_s + steps * replay(times, depths, count).makespan_s
    found = overlapped_s(times, depths, count, float(steps), weights)
    assert plain - found <= min(ahead, out_s) + min(back, back_s) + 1e-9


def test_a_stage_gains_more_than_one_pass() -> None:
    """The first device ends its eight forward passes while the second one waits for its weights."""
    times = StepTimes(
        stage_s=((0.0, 5.0, 1.0, 0.0), (0.0, 1.0, 1.0, 0.0)), hop_s=((0.0,) * 3, (0.0,) * 3)
    )
    weights = WeightTimes(out_s=(1.0, 40.0), back_s=(0.0, 0.0))
    plain = 41.0 + 5.0 * replay(times, (8,) * 4, 8).makespan_s
    gained = plain - overlapped_s(times, (8,) * 4, 8, 5.0, weights)
    passes = sum(sum(way) for way in times.stage_s)
    assert gained > 4.0 * passes
    assert gained <= _most_s(times.stage_s[0], times.hop_s[0], (8,) * 4, 8)


@pytest.mark.parametrize(
    ("policy", "schedule"), [("dssda", "1f1b"), ("uniform", "1f1b"), ("uniform", "gpipe")]
)
@pytest.mark.parametrize("name", SETTINGS)
def test_overlap_shortens_the_rounds_of_presets_by_about_a_hundredth(
    name: str, policy: str, schedule: str
) -> None:
    """Of 32 steps or more, beside which beginning and end are short."""
    setting = SETTINGS[name]
    options = replace(setting.settings, schedule=schedule, overlap=True)
    profile = setting.model.profile()
    snapshot = setting.world(7, profile).snapshot(1, profile)
    scheduler = make_scheduler(policy, options)
    plan, _ = scheduler.step(scheduler.init(snapshot), snapshot)
    plain = replace(plan, clusters=tuple(replace(c, overlap=False) for c in plan.clusters))
    before, after = price(plain, snapshot, options), price(plan, snapshot, options)
    assert 0.001 < 1.0 - after.latency_s / before.latency_s < 0.01
    assert min(cluster.local_steps for cluster in plan.clusters) >= 32
    tables = tabulate(snapshot)
    rows = rows_of_plans(tables, plan.clusters)
    chain = chain_of(planned_codecs(tables, rows, plan.clusters), rows, options)
    hops = achieved_times(chain, plan.clusters, planned_powers(chain, plan.clusters))
    out, back = hand_out_s(tables, rows)
    pairs = zip(before.clusters, after.clusters, strict=True)
    for m, ((old, new), cluster) in enumerate(zip(pairs, plan.clusters, strict=True)):
        times, depths = step_times(chain, hops, m), cluster.warmup_depth
        ways = zip(times.stage_s, times.hop_s, (out[m].sum(), back[m].sum()), strict=True)
        most_s = sum(
            min(_most_s(*way, depths, cluster.micro_batches), weights_s) for *way, weights_s in ways
        )
        assert 0.0 <= old.latency_s - new.latency_s <= most_s
        assert new.step_s == pytest.approx(old.step_s, rel=1e-9)
        assert new.energy_j == pytest.approx(old.energy_j, rel=1e-9)
        assert new.memory_bytes == old.memory_bytes
