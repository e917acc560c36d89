"""Warm-up depths: within memory, never blocking, no deeper than useful."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.core.replay import replay
from collapipe_flwr.costs.chain import (
    Chain,
    compute_full_power_times,
    make_chain,
    make_step_times,
    schedule_rows,
    tabulate_depths,
)
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import PricingOptions, count_capacity_bytes, count_peak_bytes
from collapipe_flwr.simulation.setting import ModelShape
from tests.worlds import first_round, with_devices

OPTIONS = PricingOptions(schedule="1f1b", memory_margin=0.0)


def a_chain(memory_share: tuple[float, ...], count: int = 8) -> Chain:
    """Three devices; each one's memory allows its state and that many micro-batches in flight."""
    model = ModelShape(blocks=6, decoder_blocks=6, width=256, tokens=64).profile()
    kinds = ["raspberry-pi-5", "raspberry-pi-4", "raspberry-pi-4", "raspberry-pi-4"]
    snapshot = first_round([kinds], model, 100)
    cluster, block = snapshot.clusters[0], model.blocks[0]
    devices = tuple(
        replace(d, memory_bytes=int(2 * (block.state_bytes + 4 * share * block.stash_bytes)))
        for d, share in zip(cluster.profile.devices, memory_share, strict=True)
    )
    tables = tabulate(replace(snapshot, clusters=(with_devices(cluster, devices),)))
    rows = Layouts(
        cluster_r=np.array([0]),
        member_rs=np.array([[1, 2, 3]]),
        stop_rs=np.array([[2, 4, 6]]),
        micro_batch_size_r=np.array([4]),
        micro_batches_r=np.array([count]),
    )
    return make_chain(tables, rows, OPTIONS)


@pytest.mark.parametrize("share", [(8.0, 8.0, 8.0), (2.5, 8.0, 8.0), (8.0, 1.2, 3.0), (1.0,) * 3])
def test_chosen_depths_never_block_and_fit(share: tuple[float, ...]) -> None:
    chain = a_chain(share)
    times = compute_full_power_times(chain, np.array([8e7]))
    (depths,), (makespan,) = schedule_rows(chain, times)
    step = make_step_times(chain, times, 0)
    assert replay(step, depths, 8).makespan_s == makespan
    assert list(depths) == sorted(depths, reverse=True)
    flight = tabulate_depths(chain, schedule_rows(chain, times)[0])
    need = count_peak_bytes(chain.tables, chain.rows, OPTIONS, flight)
    assert (need <= count_capacity_bytes(chain.tables, chain.rows, OPTIONS) * (1 + 1e-9)).all()


def test_a_stage_deeper_than_the_one_before_it_blocks() -> None:
    chain = a_chain((8.0, 8.0, 8.0))
    step = make_step_times(chain, compute_full_power_times(chain, np.array([8e7])), 0)
    with pytest.raises(ScheduleError, match="blocks"):
        replay(step, [3, 1, 2, 1, 1], 4)
    assert max(chain.held_rs[0]) <= 8


def test_deeper_is_not_chosen_without_gain() -> None:
    chain = a_chain((8.0, 8.0, 8.0))
    times = compute_full_power_times(chain, np.array([8e7]))
    (depths,), (makespan,) = schedule_rows(chain, times)
    step = make_step_times(chain, times, 0)
    assert makespan <= replay(step, [8] * 5, 8).makespan_s * 1.001
    shallower = [max(d - 1, 1) for d in depths]
    if shallower != list(depths):
        assert replay(step, shallower, 8).makespan_s > makespan
