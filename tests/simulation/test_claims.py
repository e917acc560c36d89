"""Comparisons on equal terms: who may win, against what, and what no plan could reach."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from collapipe_flwr.reporting.simulation import bound_lines, policy_table
from collapipe_flwr.scheduler.rules import RULES
from collapipe_flwr.simulation.score import useful_s
from collapipe_flwr.simulation.setting import Setting
from collapipe_flwr.simulation.simulate import PolicyResult, Simulation, simulate
from collapipe_flwr.simulation.summary import compare, simulation_json
from collapipe_flwr.simulation.world import EnergyBudget

POLICIES = ("dssda", "fedavg", "splitfed", "uniform", "throughput")


@pytest.fixture(scope="module")
def simulation(small: Setting) -> Simulation:
    """All budgets are kept."""
    return simulate(replace(small, policies=POLICIES, budget=EnergyBudget(), seeds=(0, 1)))


def changed(simulation: Simulation, policy: str, **fields: float) -> Simulation:
    """The same with other numbers in every seed of one policy."""

    def other(result: PolicyResult) -> PolicyResult:
        scores = tuple(replace(score, **fields) for score in result.scores)
        return replace(result, scores=scores) if result.policy == policy else result

    return replace(simulation, policies=tuple(map(other, simulation.policies)))


def claims(simulation: Simulation) -> dict[str, Any]:
    compared: Any = compare(simulation)
    return dict(compared["claims"])


def test_the_best_pipeline_is_the_best_of_those_within_budgets(simulation: Simulation) -> None:
    strong = changed(simulation, "throughput", compute_efficiency=0.9)
    claim = claims(strong)["efficiency_higher_percent"]
    assert claim["rival"] == "throughput" and not claim["kept"]
    over = changed(strong, "throughput", energy_over_budget_max=1.001)
    assert claims(over)["efficiency_higher_percent"]["rival"] in ("uniform", "splitfed")
    nobody = over
    for name in ("uniform", "splitfed"):
        nobody = changed(nobody, name, energy_over_budget_max=2.0)
    assert claims(nobody)["efficiency_higher_percent"]["seen"] is None


def test_breaking_a_budget_is_marked_everywhere(simulation: Simulation) -> None:
    over = changed(simulation, "uniform", energy_over_budget_max=1.001)
    policies: Any = simulation_json(over)["policies"]
    assert [n for n, p in policies.items() if not p["keeps_budgets"]] == ["uniform"]
    cells = [str(cell) for cell in policy_table(over).columns[0].cells]
    assert "uniform *" in cells and "dssda" in cells
    assert "* breaks an energy budget" in bound_lines(over)[-1]
    assert "* breaks" not in " ".join(bound_lines(simulation))


def test_latency_counts_against_the_quickest_of_the_three_even_over_budget(
    simulation: Simulation,
) -> None:
    quick = changed(simulation, "fedavg", energy_over_budget_max=9.0)
    quick = changed(quick, "fedavg", latency_s=(1e-3,) * 3)  # type: ignore[arg-type]
    claim = claims(quick)["latency_lower_percent"]
    assert claim["rival"] == "fedavg" and not claim["kept"]
    assert claim["seen"] < claim["possible"] < 0


def test_nobody_reaches_more_than_is_possible(simulation: Simulation) -> None:
    for key in ("latency_lower_percent", "efficiency_higher_percent"):
        claim = claims(simulation)[key]
        assert claim["seen"] <= claim["possible"]
        assert claim["seeds"]["worst"] <= claim["seeds"]["median"]
    values: Any = simulation_json(simulation)
    for name in ("dssda", "uniform", "throughput"):
        assert values["policies"][name]["latency_over_bound"] >= 1
    assert values["bounds"]["latency_s"] <= values["bounds"]["latency_in_budget_s"]


def test_efficiency_is_a_constant_of_the_world_over_latency(small: Setting) -> None:
    """So the efficiency claim is one about latency against the best pipeline within budgets."""
    profile = small.model.profile()
    result = simulate(replace(small, policies=("dssda", "uniform", "random")))
    for each in result.policies:
        score = each.scores[0]
        seconds = useful_s(small.world(0, profile), profile)
        assert score.compute_efficiency == pytest.approx(seconds / score.latency_mean_s)
        assert score.compute_efficiency <= result.bounds[0].compute_efficiency


def test_rules_keep_the_cap_where_they_can_and_are_not_held_to_it_elsewhere(
    small: Setting,
) -> None:
    settings = replace(small.settings, max_model_share=0.06, best_batches=True)
    capped = replace(small, settings=settings, policies=tuple(RULES), devices=3)
    free = replace(capped, settings=replace(settings, max_model_share=1.0))
    plans = {r.policy: r.scores[0].last_plan for r in simulate(capped).policies}
    freely = {r.policy: r.scores[0].last_plan for r in simulate(free).policies}
    for name in ("fedavg", "splitfed"):
        assert [c.model_share for c in plans[name].clusters] == [None, None]
        assert [c.segments for c in plans[name].clusters] == [
            c.segments for c in freely[name].clusters
        ]
    assert [c.model_share for c in plans["uniform"].clusters] == [0.06, 0.06]


@pytest.mark.parametrize("policy", ["fedavg", "splitfed", "uniform", "throughput"])
def test_no_pair_for_all_is_better_than_those_that_rules_choose(
    small: Setting, policy: str
) -> None:
    still = replace(small, channel="static", rounds=1, policies=(policy,))
    free = replace(still.settings, bound=False, best_batches=True)
    chosen = simulate(replace(still, settings=free)).policies[0].scores[0].latency_mean_s
    for size, count in free.batches:
        one = replace(free, micro_batch_sizes=(size,), micro_batches=(count,))
        alone = simulate(replace(still, settings=one)).policies[0].scores[0].latency_mean_s
        assert chosen <= alone * (1 + 1e-4)  # a thousandth of the objective is the price of energy


def test_equal_devices_forbid_the_claims_and_the_bound_says_so(small: Setting) -> None:
    """Uniform segments are nearly as good as any plan can be."""
    equal = replace(
        small,
        kinds=("phone",),
        clusters=1,
        devices=4,
        examples=640,
        budget=EnergyBudget(),
        policies=("dssda", "uniform"),
        settings=replace(small.settings, schedule="1f1b", micro_batches=(16,), bound=False),
    )
    for key, needed in (("latency_lower_percent", 48.98), ("efficiency_higher_percent", 15.09)):
        claim = claims(simulate(equal))[key]
        assert claim["seen"] <= claim["possible"] < needed and not claim["kept"]
