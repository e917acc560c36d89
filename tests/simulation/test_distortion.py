"""Wrong and old profiles: what schedulers see of them, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from collapipe_flwr.core.domain import Snapshot
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.costs.tables import tabulate
from collapipe_flwr.simulation.episode import Distortion
from collapipe_flwr.simulation.score import Score
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.simulate import simulate

EXACT = Distortion()


@cache
def score(setting: Setting) -> Score:
    (policy,) = simulate(setting).policies
    return policy.scores[0]


def seen(setting: Setting, distortion: Distortion, index: int) -> Snapshot:
    profile = setting.model.profile()
    world = setting.world(3, profile)
    return distortion.view(world, profile)(world.snapshot(index, profile))


def factors(setting: Setting, distortion: Distortion, index: int) -> np.ndarray:
    """Seen over true speeds."""
    tables = [tabulate(seen(setting, d, index)) for d in (distortion, EXACT)]
    return np.asarray(tables[0].members.speed_mi / tables[1].members.speed_mi)


def test_errors_stay_within_their_share_and_differ_by_device(small: Setting) -> None:
    wrong = factors(replace(small, devices=40), Distortion(error=0.3), 1)
    assert 0.7 <= wrong.min() < 0.75 and 1.25 < wrong.max() <= 1.3
    assert len(set(wrong.ravel())) == wrong.size


def test_noise_is_new_every_round_and_bias_is_not(small: Setting) -> None:
    for kind, same in (("noise", False), ("bias", True)):
        distortion = Distortion(error=0.3, kind=kind)
        first, later = (factors(small, distortion, index) for index in (1, 2))
        assert np.allclose(first, later) == same
        assert np.array_equal(first, factors(small, distortion, 1))


def test_delay_shows_the_channel_of_an_earlier_round(small: Setting) -> None:
    late = seen(small, Distortion(delay=2), 5)
    assert late.round_index == 5
    assert late.clusters == seen(small, EXACT, 3).clusters
    assert seen(small, Distortion(delay=2), 1) == seen(small, EXACT, 1)


@pytest.mark.parametrize("kind", ["noise", pytest.param("bias", marks=pytest.mark.slow)])
def test_wrong_and_late_profiles_cost_little_and_break_no_budget(small: Setting, kind: str) -> None:
    settings = replace(small.settings, energy_advance=0.0)  # else budgets are kept later on
    setting = replace(small, devices=3, rounds=7, policies=("dssda",), settings=settings)
    wrong = replace(setting, distortion=Distortion(error=0.3, kind=kind, delay=1))
    exact, misled = score(setting), score(wrong)
    assert np.mean(misled.latency_s) <= 1.15 * np.mean(exact.latency_s)
    assert misled.latency_s != exact.latency_s
    assert exact.energy_over_budget_max <= 1 and misled.energy_over_budget_max <= 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"error": 1.0}, "--profile-error"),
        ({"kind": "x"}, "one of noise, bias"),
        ({"delay": -1}, "0"),
    ],
)
def test_bad_distortions_are_refused(values: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Distortion(**values)  # type: ignore[arg-type]
