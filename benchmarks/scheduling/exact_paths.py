"""Exact shortest paths at full power and equal bandwidth, for rivals of the scheduler's search."""

from __future__ import annotations

import numpy as np

from benchmarks.scheduling.plain_costs import NONE, PlainCosts, Rows
from benchmarks.scheduling.rivals import Pool
from collapipe_flwr.core.errors import InfeasibleError
from collapipe_flwr.costs.arrays import Array, Ints
from collapipe_flwr.costs.layouts import sum_spans
from collapipe_flwr.scheduler.segment_dp import SegmentProblem, any_order, best_path


def exact(costs: PlainCosts, pairs: Ints) -> Pool:
    """The optimum of every cluster at every pair of ``pairs``, a second at the round's price."""
    found = []
    for pair in pairs:
        rho = float(costs.rho(np.full((1, costs.clusters), pair.prod()))[0])
        for m in range(costs.clusters):
            problem = segments(costs, m, pair, costs.planner.latency_price * rho)
            try:
                path = best_path(problem, any_order)
            except InfeasibleError:
                continue
            found.append((m, path.devices, path.stops, pair))
    device = np.full((len(found), costs.devices), NONE)
    blocks = np.zeros_like(device)
    for r, (_, devices, stops, _) in enumerate(found):
        device[r, : len(devices)] = np.array(devices) + 1
        blocks[r, : len(stops)] = np.diff(stops, prepend=0)
    grid = np.array([pair for *_, pair in found])
    rows = Rows(np.array([m for m, *_ in found]), device, blocks, *grid.T.copy())
    return Pool(rows, *costs.price_of(rows))


def segments(costs: PlainCosts, m: int, pair: Ints, slope: float) -> SegmentProblem:
    """One cluster's problem at ``slope`` per second, GPipe, without what every layout costs."""
    size, count = (int(v) for v in pair)
    members, prefix, n = costs.tables.members, costs.prefix, int(costs.present[m].sum()) - 1
    steps = float(costs.steps(np.array([m]), np.array([size * count]))[0])
    ahead, back = sum_spans(prefix.forward_flop_l), sum_spans(prefix.backward_flop_l)
    weights = sum_spans(prefix.parameter_bytes_l)

    def each(values_i: Array) -> Array:
        return np.asarray(values_i[1 : n + 1, None, None])

    speed, worth = each(members.speed_mi[m]), each(costs.price[m] * members.energy_per_flop_mi[m])
    forward, backward, update = size * ahead / speed, size * back / speed, 3.0 * weights
    out, home = each(costs.ahead[m, 0, :-1]), each(costs.ahead[m, :, 0])
    cost = slope * (steps * (forward + backward + update / speed) + weights * (out + home))
    cost = cost + steps * worth * (size * count * (ahead + back) + update)
    send = costs.send_worth[m]
    cost = cost + weights * (send[0] * out + each(send) * home)
    need = sum_spans(prefix.state_bytes_l) + size * count * sum_spans(prefix.stash_bytes_l)
    share = costs.most_bytes(np.array([m]), np.array([float(size)]), np.array([float(count)]))
    room = np.minimum(costs.room[m], share)
    allowed = np.tri(len(need), k=-1, dtype=bool).T & (need <= each(room))
    hops = np.array([*range(n + 1), costs.ahead.shape[2] - 1])
    links = np.ix_(np.array([m]), np.arange(n + 1), hops)
    data = size * prefix.cut_bytes_l * costs.coded[links][0][:, :, None]
    there, back_s = (
        data * costs.ahead[links][0][:, :, None],
        data * costs.back[links][0][:, :, None],
    )
    sent = send[: n + 1, None, None] * there
    sent = sent + costs.back_worth[m, links[2]].reshape(1, -1, 1) * back_s
    ends = size * costs.ends_2em[:, :, m].max(1)
    return SegmentProblem(
        stage_cost_nlk=np.where(allowed, cost, np.inf),
        stage_forward_nlk=forward,
        stage_backward_nlk=backward,
        hop_cost_ijl=slope * steps * (there + back_s) + steps * count * sent,
        hop_forward_ijl=there,
        hop_backward_ijl=back_s,
        pace=slope * steps * (count - 1.0),
        floor=(float(ends[0]), float(ends[1])),
        fixed_cost=0.0,
    )
