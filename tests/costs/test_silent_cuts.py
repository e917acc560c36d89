"""What does not train sends no gradient back and stays on its device, and is priced so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.costs.chain import (
    FEW_STEPS,
    Chain,
    choose_depths,
    compute_full_power_times,
    make_chain,
    price_rows,
    solve_powers,
)
from collapipe_flwr.costs.layouts import Layouts
from collapipe_flwr.costs.measured import compute_server_s
from collapipe_flwr.costs.price import price
from collapipe_flwr.costs.replicas import PricedCluster
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.models.describing import keep_frozen
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.simulation.setting import ModelShape
from tests.rounds import BLOCKS, make_splitter
from tests.worlds import equal_ends, first_round, planned

FROZEN = 2


def silent(model: ModelProfile, blocks: int) -> ModelProfile:
    """The model whose embedding and first blocks do not train."""
    first = replace(model.embedding, returns=False)
    kept = (replace(b, returns=n >= blocks) for n, b in enumerate(model.blocks))
    return replace(model, embedding=first, blocks=tuple(kept))


def make_rows(blocks: int | None, schedule: str, copies: int) -> Chain:
    """Rows of two devices with two blocks each."""
    model = ModelShape(blocks=4, decoder_blocks=4, width=256, tokens=64).profile()
    model = model if blocks is None else silent(model, blocks)
    snapshot = first_round([["raspberry-pi-5", "raspberry-pi-4", "raspberry-pi-4"]], model, 100)
    rows = Layouts(
        cluster_r=np.zeros(copies, np.int64),
        member_rs=np.array([[1, 2]] * copies),
        stop_rs=np.array([[2, 4]] * copies),
        micro_batch_size_r=np.full(copies, 4),
        micro_batches_r=np.full(copies, 8),
    )
    return make_chain(tabulate(snapshot), rows, PricingOptions(schedule=schedule))


@pytest.mark.parametrize("copies", [1, FEW_STEPS])  # of which many are replayed together
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_that_nobody_needs_take_no_time_and_no_energy(schedule: str, copies: int) -> None:
    heard, quiet = (make_rows(blocks, schedule, copies) for blocks in (None, FROZEN))
    assert (quiet.hops.returns == [[False, False, True]]).all()
    times = compute_full_power_times(heard, np.array([1e6] * copies))
    powers = solve_powers(heard, np.array([1e6] * copies), times)
    without = times.copy()
    without[:, :2, 1] = 0.0
    found, wanted = price_rows(quiet, times, powers), price_rows(heard, without, powers)
    assert (found.latency_s == wanted.latency_s).all()
    assert (found.energy_j == wanted.energy_j).all()
    assert (found.latency_s < price_rows(heard, times, powers).latency_s).all()
    rows = np.arange(copies)
    taken, due = (choose_depths(c, t, rows)[1] for c, t in ((quiet, times), (heard, without)))
    assert (taken == due).all() and (taken < choose_depths(heard, times, rows)[1]).all()


def test_frozen_weights_travel_between_server_and_control_unit_alone() -> None:
    model = equal_ends(4)
    snapshot = first_round([["raspberry-pi-5", "phone", "raspberry-pi-4"]], model, 96)
    plan, profile = planned(snapshot), snapshot.clusters[0].profile

    def priced(**sizes: int) -> tuple[PricedCluster, float]:
        changed = replace(model, blocks=tuple(replace(b, **sizes) for b in model.blocks))
        (found,) = price(plan, replace(snapshot, model=changed)).clusters
        return found, compute_server_s(profile, changed)

    size = model.blocks[0].parameter_bytes
    (frozen, way_s), (absent, less_s) = priced(frozen_bytes=size), priced(parameter_bytes=0)
    assert frozen.energy_j == absent.energy_j and frozen.step_s == absent.step_s
    assert frozen.latency_s - absent.latency_s == pytest.approx(way_s - less_s)
    assert frozen.latency_s < priced()[0].latency_s


def test_a_profile_knows_where_gradients_come_back() -> None:
    shape = BatchShape(source_length=8)
    splitter = make_splitter("bert", dropout=0.0)
    assert profile_model(splitter, shape).embedding.returns
    frozen = replace(splitter.spec, frozen=splitter.front_keys(FROZEN))
    model = profile_model(Splitter(frozen), shape)
    assert [b.returns for b in model.blocks] == [n >= FROZEN for n in range(BLOCKS)]
    assert [b.trained_bytes > 0 for b in model.blocks] == [n >= FROZEN for n in range(BLOCKS)]
    assert model.embedding.trained_bytes == 0 < model.embedding.parameter_bytes
    assert not model.embedding.returns
    kept = profile_model(Splitter(keep_frozen(frozen)), shape)
    assert not kept.embedding.returns and all(b.returns for b in kept.blocks)
