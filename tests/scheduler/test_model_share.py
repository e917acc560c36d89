"""No device holds more of the model than allowed, unless its cluster leaves no other plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.oracles.brute_force import optimal_plan
from collapipe_flwr.core.domain import ClusterPlan, ModelProfile, Plan, Snapshot
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.scheduler import replicating
from collapipe_flwr.scheduler.model_share import compute_segment_needs, packs
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.scheduler.replan import ReplanInput, replan
from collapipe_flwr.simulation.setting import ModelShape
from tests.thorough import examples
from tests.worlds import draw_snapshot, first_round, planned

FREE = SchedulerConfig(
    schedule="gpipe", micro_batch_sizes=(2, 8), micro_batches=(2, 4), memory_margin=0.0
)


def shape(blocks: int) -> ModelProfile:
    """Most of the model is its encoder."""
    return ModelShape(
        blocks=blocks, width=128, tokens=32, decoder_blocks=1, vocabulary=500
    ).profile()


def largest_share(plan: Plan) -> float:
    """The fullest device's memory over that of the whole model, with the plan's micro-batches."""
    return max(map(cluster_share, plan.clusters))


def cluster_share(plan: ClusterPlan) -> float:
    held = (plan.memory_bytes[name] for s in plan.segments for name in s.device_ids)
    return max(held) / (plan.whole_bytes or 0)


def one_strong(devices: int, blocks: int = 8) -> Snapshot:
    """A board that is far faster than its neighbours: left alone it gets everything."""
    kinds = ["raspberry-pi-5", "jetson-orin-nano", *["raspberry-pi-4"] * (devices - 1)]
    return first_round([kinds], shape(blocks), 200)


@pytest.mark.parametrize(("schedule", "least"), [("gpipe", 0.22), ("1f1b", 0.25)])
@pytest.mark.parametrize("devices", [4, 7])
def test_a_strong_board_gets_no_more_than_its_share(
    schedule: str, least: float, devices: int
) -> None:
    """Two of eight blocks are 0.21; under 1F1B 0.24, as two micro-batches are in flight."""
    snapshot, options = one_strong(devices), replace(FREE, schedule=schedule)
    assert largest_share(planned(snapshot, options)) > 0.3
    for share in (0.3, least):
        plan = planned(snapshot, replace(options, max_model_share=share))
        assert largest_share(plan) <= share + 1e-9
        assert plan.clusters[0].model_share == share
        assert plan.clusters[0].memory_margin == options.memory_margin == 0.0
        assert from_json(Plan, to_json(plan), "plan") == plan


def test_brute_force_keeps_the_share_and_dssda_finds_its_optimum() -> None:
    snapshot = one_strong(3, blocks=4)
    options = replace(FREE, max_model_share=0.4)
    best, ours = optimal_plan(snapshot, options), planned(snapshot, options)
    assert largest_share(best) <= 0.4
    assert ours.latency_s == pytest.approx(best.latency_s, rel=0.01)


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_depths_under_1f1b_count_and_so_do_replicas(
    share: float, replicas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is mostly activations, first stages hold several times those of a batch."""
    monkeypatch.setattr(replicating, "WORTH", -1e9)  # also where they make rounds longer
    model = ModelShape(blocks=6, width=32, tokens=256, decoder_blocks=1, vocabulary=50).profile()
    kinds = [["raspberry-pi-5", "jetson-orin-nano", "phone", "raspberry-pi-4"], ["phone"] * 7]
    options = replace(FREE, schedule="1f1b", replicas=replicas, max_model_share=share)
    shared = 0
    for seed in (2900, 2901, 2902):
        for cluster in planned(first_round(kinds, model, [60, 90], seed), options).clusters:
            assert cluster.model_share is not None and share <= cluster.model_share < 1.0
            assert cluster_share(cluster) <= cluster.model_share * (1.0 + 1e-9)
            shared += max(cluster.replicas) > 1
    assert (shared > 0) == (replicas and share == 0.8)  # where there is room for them


def test_few_devices_relax_the_share_as_little_as_needed_and_say_so() -> None:
    snapshot = one_strong(2)
    plan = planned(snapshot, replace(FREE, max_model_share=0.05))
    relaxed = plan.clusters[0].model_share
    assert relaxed is not None and 0.05 < relaxed < 0.5
    assert largest_share(plan) <= relaxed + 1e-9
    assert [s.stop_block - s.first_block for s in plan.clusters[0].segments] == [4, 4]


def test_only_the_cluster_that_needs_it_is_relaxed() -> None:
    model = shape(8)
    rows = [["raspberry-pi-5"] * 2, ["raspberry-pi-5"] * 6]
    snapshot = first_round(rows, model, 100)
    alone, many = planned(snapshot, replace(FREE, max_model_share=0.25)).clusters
    assert len(alone.segments) == 1 and alone.model_share is not None and alone.model_share > 0.25
    assert many.model_share == 0.25


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_keeps_the_share_or_ends_it(schedule: str) -> None:
    snapshot = one_strong(7)
    options = replace(FREE, schedule=schedule, max_model_share=0.4)
    plan = planned(snapshot, options).clusters[0]
    names = [device.device_id for device in snapshot.clusters[0].profile.devices]
    seen = set()
    for left in range(1, 7):
        rest = ReplanInput(
            profile=snapshot.clusters[0].profile,
            model=snapshot.model,
            present=names[-left:],
        )
        after = replan(plan, rest)
        assert cluster_share(after) <= (after.model_share or np.inf) * (1.0 + 1e-9)
        seen.add(after.model_share)
    assert seen == {0.4, None}


def test_without_a_share_nothing_is_capped_or_recorded() -> None:
    assert planned(one_strong(4), FREE).clusters[0].model_share is None
    with pytest.raises(ScheduleError, match=r"max-model-share must be in \(0, 1\], got 0"):
        replace(FREE, max_model_share=0)


def test_segment_needs_are_what_plans_predict() -> None:
    snapshot = draw_snapshot(4)
    single = replace(FREE, micro_batch_sizes=(4,), micro_batches=(2,))
    needs = compute_segment_needs(tabulate(snapshot), single, 0)
    for cluster in planned(snapshot, single).clusters:
        for s in cluster.segments:
            need = needs[s.first_block, s.stop_block]
            assert cluster.memory_bytes[s.device_id] == pytest.approx(need, abs=1)


@examples(20, 60)
@given(
    st.lists(st.floats(0.0, 5.0), min_size=1, max_size=4),
    st.lists(st.just(1.0), min_size=1, max_size=6),
    st.integers(0, 6),
    st.integers(0, 15),
)
def test_packing_equal_blocks_is_exact(
    rooms: list[float], blocks: list[float], kept: int, trusted: int
) -> None:
    """Against every order of devices and, for each, filling them one after the other."""
    starts = [0 if trusted >> n & 1 else min(kept, len(blocks)) for n in range(len(rooms))]
    reach = np.concatenate([[0.0], np.cumsum(blocks)])
    needs: NDArray[np.float64] = np.where(
        reach[None, :] > reach[:, None], reach[None, :] - reach[:, None], np.inf
    )

    def fills(order: tuple[tuple[float, int], ...]) -> bool:
        left = len(blocks)
        for room, first in order:
            left -= min(int(room), max(left - first, 0))
        return left == 0

    orders = permutations(zip(rooms, starts, strict=True))
    assert packs([needs], np.array(rooms), np.array(starts)) == any(map(fills, orders))
