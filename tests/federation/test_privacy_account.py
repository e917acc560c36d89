"""What private training costs, by the library's accountant, and what a cluster may still spend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import RecordDict

from collapipe_flwr.core.errors import ConfigError, DataError, PrivacySpent
from collapipe_flwr.federation.accepted import Progress
from collapipe_flwr.federation.client.node_state import NodeState
from collapipe_flwr.federation.privacy_account import (
    Charge,
    charge,
    count_epsilon,
    read_charges,
)
from collapipe_flwr.pipeline.config import NoiseConfig

dp_accounting = pytest.importorskip("dp_accounting")

DUE = Charge(examples=500, batch=10, noise_multiplier=2.0, steps=8)
NOISE = NoiseConfig(clip_norm=1.0, noise_multiplier=2.0, delta=1e-4)


def state_of(folder: Path | None, server_round: int = 1) -> NodeState:
    return NodeState(
        records=RecordDict(),
        server_round=server_round,
        progress=Progress(),
        run_id="a-run",
        index=0,
        state_dir=folder,
    )


def account_in(folder: Path) -> tuple[Charge, ...]:
    (path,) = folder.rglob("privacy.jsonl")
    return read_charges(path)


def test_epsilon_is_the_librarys_for_half_the_noise_as_examples_are_replaced() -> None:
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        500, 10, dp_accounting.GaussianDpEvent(1.0)
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting.rdp.RdpAccountant(neighboring_relation=relation)
    accountant.compose(event, 16)
    assert count_epsilon([DUE, DUE], 1e-4) == accountant.get_epsilon(1e-4)


@pytest.mark.parametrize(
    ("examples", "batch", "noise", "steps", "delta", "epsilon"),
    [
        (4922, 256, 1.4, 25, 1e-5, 7.623364460686749),
        (4922, 256, 3.0, 25, 1e-5, 1.9471972293428554),
        (500, 10, 2.0, 16, 1e-4, 1.2387522528593888),
        (10000, 64, 2.5, 1000, 1e-6, 1.8990009298148278),
    ],
)
def test_epsilon_is_that_of_an_independent_library(
    examples: int, batch: int, noise: float, steps: int, delta: float, epsilon: float
) -> None:
    """autodp 0.2.3.1: GaussianMechanism(noise / 2) where neighbours replace one example, then
    AmplificationBySampling(PoissonSampling=False) and Composition.
    """
    due = Charge(examples=examples, batch=batch, noise_multiplier=noise, steps=steps)
    assert count_epsilon([due], delta) == pytest.approx(epsilon, rel=1e-6)


def test_every_order_counts_once_it_begins_whatever_becomes_of_it(tmp_path: Path) -> None:
    """Also an order that is sent again, after a restart, for a round that the server repeats."""
    first, again = (charge(state_of(tmp_path), NOISE, DUE, DUE) for _ in range(2))
    assert account_in(tmp_path) == (DUE,) * 2
    assert first == (count_epsilon([DUE], 1e-4), count_epsilon([DUE] * 2, 1e-4))
    assert again.epsilon == first.next_epsilon


def test_an_order_beyond_the_budget_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    enough = count_epsilon([DUE] * 2, 1e-4)
    noise = replace(NOISE, max_epsilon=enough)
    charge(state_of(tmp_path), noise, DUE, DUE)
    charge(state_of(tmp_path), noise, DUE, DUE)
    with pytest.raises(PrivacySpent, match="max-epsilon"):
        charge(state_of(tmp_path), noise, DUE, DUE)
    assert len(account_in(tmp_path)) == 2
    charge(state_of(tmp_path), noise, replace(DUE, steps=0), DUE)


def test_an_account_that_is_damaged_is_not_an_empty_one(tmp_path: Path) -> None:
    charge(state_of(tmp_path), NOISE, DUE, DUE)
    (path,) = tmp_path.rglob("privacy.jsonl")
    with path.open("a") as file:
        file.write('{"examples": 500')  # as a power cut before the order began leaves it
    assert read_charges(path) == (DUE,)
    path.write_text("nonsense\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        charge(state_of(tmp_path), NOISE, DUE, DUE)


def test_what_no_account_covers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state-dir"):
        charge(state_of(None), NOISE, DUE, DUE)
    with pytest.raises(ConfigError, match="delta"):
        charge(state_of(tmp_path), replace(NOISE, delta=0.01), DUE, DUE)
    with pytest.raises(DataError, match="500 examples"):
        charge(state_of(tmp_path), NOISE, DUE, replace(DUE, batch=501))
    assert not list(tmp_path.rglob("privacy.jsonl"))
