"""Simulations: the same seeds give the same JSON, in the promised form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from collapipe_flwr import cli
from collapipe_flwr.core.errors import ScheduleError
from collapipe_flwr.scheduler.policies import POLICIES
from collapipe_flwr.simulation.setting import ModelShape, Setting
from collapipe_flwr.simulation.simulate import simulate
from collapipe_flwr.simulation.summary import simulation_json
from collapipe_flwr.simulation.world import EnergyBudget

SMALL = (
    "simulate --clusters 2 --devices 2 --blocks 3 --width 64 --tokens 16 --examples 100 --rounds 2 "
    "-c scheduler.micro-batch-sizes=2,4 -c scheduler.micro-batches=2,4 "
    "--policies dssda,uniform,random -c scheduler.schedule=gpipe "
    "--channel block-fading --seeds 3,4"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """Runs the command with more arguments; returns the JSON file without decision times."""

    def call(*more: str) -> bytes:
        path = tmp_path_factory.mktemp("simulate") / "made" / "out.json"
        words = ["collapipe", *SMALL.split(), "--json", str(path), *more]
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
            patch.setattr("sys.argv", words)
            cli.main()
        assert end.value.code == 0
        values = json.loads(path.read_bytes())
        for policy in values["policies"].values():
            assert policy.pop("decision_s")["median"] > 0
        return json.dumps(values).encode()

    return call


@pytest.fixture(scope="module")
def plain(run: Callable[..., bytes]) -> bytes:
    """What the command writes without any."""
    return run()


def test_equal_seeds_give_equal_bytes_and_other_seeds_others(
    run: Callable[..., bytes], plain: bytes
) -> None:
    assert run() == plain
    assert run("--seeds", "5") != plain


def test_json_has_the_promised_keys(plain: bytes) -> None:
    policies: dict[str, Any] = json.loads(plain)["policies"]
    assert set(policies) == {"dssda", "uniform", "random"}
    for policy in policies.values():
        assert policy["latency_s"]["p95"] >= policy["latency_s"]["mean"] > 0
        assert 0 < policy["compute_efficiency"] <= 1
        assert policy["compute_efficiency"] >= policy["capacity_used"] > 0
        assert policy["peak_device_memory_bytes"] > 0
        assert policy["energy_over_budget_max"] > 0
        assert policy["time_to_target_s"] > 0
        assert [seed["seed"] for seed in policy["seeds"]] == [3, 4]


def test_every_policy_runs_and_latency_only_equals_dssda_without_budgets(small: Setting) -> None:
    free = replace(small, policies=POLICIES, budget=EnergyBudget())
    result = simulate(free)
    ours, blind = result.policy("dssda"), result.policy("latency-only")
    assert ours is not None and blind is not None
    assert ours.scores[0].latency_s == blind.scores[0].latency_s
    assert ours.scores[0].energy_over_budget_max == 0
    assert {p.policy for p in result.policies if p.refusal is None} == set(POLICIES)


def test_a_policy_that_fits_nowhere_is_reported_not_raised(small: Setting) -> None:
    # 16 blocks of this width fit no board alone, but three boards together.
    large = replace(
        small,
        kinds=("jetson-nano",),
        devices=3,
        clusters=1,
        rounds=1,
        model=ModelShape(blocks=16, width=1024, tokens=16, decoder_blocks=1),
        policies=("dssda", "fedavg"),
    )
    result = simulate(large)
    assert result.policy("dssda") is not None
    values: Any = simulation_json(result)
    assert "fits its devices' memories" in values["policies"]["fedavg"]["refused"]
    with pytest.raises(ScheduleError, match="no policy could run; fedavg"):
        simulate(replace(large, policies=("fedavg",)))


def test_a_larger_penalty_weight_buys_latency_with_energy(small: Setting) -> None:
    tight = replace(
        small, clusters=1, rounds=3, budget=EnergyBudget(joule=2.0), policies=("dssda",)
    )
    weights = (1.0, 1000.0)
    settings = [replace(tight.settings, penalty_weight=weight) for weight in weights]
    ran = [simulate(replace(tight, settings=each)).policies[0].scores[0] for each in settings]
    assert ran[1].latency_mean_s <= ran[0].latency_mean_s
    assert ran[1].energy_over_budget_max >= ran[0].energy_over_budget_max


def test_ticks_count_rounds(small: Setting) -> None:
    ticks: list[str] = []
    policies = ("fedavg", "uniform")
    simulate(replace(small, seeds=(0, 1), policies=policies), ticks.append)
    assert ticks == [name for name in policies for _ in range(2 * small.rounds)]


def test_options_reach_the_schedulers(run: Callable[..., bytes], plain: bytes) -> None:
    more = "-c scheduler.schedule=1f1b -c scheduler.replicas=true --best-batches"
    more += " --edge-shared --recompute"
    seen = "--profile-error 0.2 --profile-error-kind bias --profile-delay 1"
    keys = ("-c", "scheduler.max-model-share=0.5 scheduler.penalty-weight=2")
    setting = json.loads(run(*more.split(), *seen.split(), *keys))["setting"]
    chosen = setting["settings"]
    assert chosen["schedule"] == "1f1b" and chosen["penalty_weight"] == 2
    assert chosen["max_model_share"] == 0.5 and chosen["micro_batches"] == [2, 4]
    switches = ("replicas", "edge_shared", "recompute")
    assert all(chosen[k] for k in (*switches, "best_batches"))
    assert setting["distortion"] == {"error": 0.2, "kind": "bias", "delay": 1}
    without = json.loads(plain)["setting"]
    assert not any(without["settings"][k] for k in switches)
    assert without["distortion"] == {"error": 0.0, "kind": "noise", "delay": 0}


def latency(setting: Setting, policy: str, **changes: Any) -> float:
    """Mean latency of a policy with some of its settings changed."""
    settings = replace(setting.settings, **changes)
    result = simulate(replace(setting, policies=(policy,), settings=settings)).policies[0]
    assert result.refusal is None
    return sum(result.scores[0].latency_s)


def test_sharing_the_edge_and_computing_again_cost_time(small: Setting) -> None:
    base = latency(small, "uniform")
    assert latency(small, "uniform", edge_shared=True) > base
    assert latency(small, "uniform", recompute=True) > base


def test_rules_may_choose_batches_once_and_gain_by_it(small: Setting) -> None:
    grid = replace(small.settings, micro_batches=(1, 2, 8), bound=False)
    setting = replace(small, settings=grid)
    assert latency(setting, "uniform", best_batches=True) < latency(setting, "uniform")
    free = replace(setting, settings=replace(grid, best_batches=True), policies=("uniform",))
    plan = simulate(free).policies[0].scores[0].last_plan  # of a later round than the choice
    assert {c.micro_batches for c in plan.clusters} == {8}


def test_fedavg_trains_the_whole_model_on_its_device(small: Setting) -> None:
    score = simulate(replace(small, policies=("fedavg",))).policies[0].scores[0]
    plan = score.last_plan.clusters[0]
    batch = plan.micro_batch_size  # 1F1B keeps one micro-batch in flight
    model = small.model.profile()
    parts = (model.embedding, *model.blocks, model.decoder)
    held = sum(part.state_bytes + batch * part.stash_bytes for part in parts)
    assert score.peak_device_memory_bytes == int(held)
