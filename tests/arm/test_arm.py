"""A cluster of two architectures computes what one computes: an arm64 board beside an x86 one.

The board is a real `collapipe device` in an arm64 root, with the torch of a Raspberry Pi (2.9). The
control unit (this process), the other device and the edge are of this machine. All links have
mutual TLS. "Near" is what `tests.closeness` allows for rounding: 64 roundings in single precision
of the largest number, 8e-6 of it, per step that the optimizer takes.
"""

from __future__ import annotations

import itertools
import platform
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from collapipe_flwr.cluster.check import CheckSettings, check_cluster
from collapipe_flwr.pipeline.benchmark import BenchmarkRequest
from tests.arm.board import ArmBoard
from tests.arm.root import ArmRoot, missing
from tests.closeness import assert_near, near
from tests.laws.test_daemons_equal_whole import Cluster, cluster_of_daemons
from tests.rounds import (
    ADAMW,
    Cut,
    largest_difference,
    make_splitter,
    order_of,
    steps_of,
    train_split,
    train_whole,
)

pytestmark = [
    pytest.mark.arm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
ARM, DEADLINE_S = 1, 600.0  # the board is d1; for an emulated processor, whatever it is asked
CUT = Cut(stops=(1, 4, 5), micro_batches=(2, 2, 1), schedule="1f1b")  # it holds three of five
WITHOUT = ("flwr", "ray", "cvxpy", "datasets")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr("collapipe_flwr.cluster.remote.PROBE_S", DEADLINE_S)
        folder = tmp_path_factory.mktemp("arm")
        made = cluster_of_daemons(folder, tls=True, boards={"d1": ArmBoard})
        yield replace(stack.enter_context(made), deadline_s=DEADLINE_S)


def trained(cluster: Cluster, splitter, weights, steps, between=lambda: None, every: int = 0):
    """A round with dropout: losses, all weights, and the result."""
    order = order_of(CUT, weights, ADAMW, dropout_seed=3)
    order = replace(order, learning=replace(order.learning, deadline_s=DEADLINE_S))
    result = cluster.train(splitter, order, steps, between, every)
    return result.losses, dict(result.weights), result


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> str:
    return f"weights differ by at most {largest_difference(found, wanted):.1e}"


def test_the_board_has_another_processor_and_neither_flower_nor_data_nor_solver() -> None:
    root = ArmRoot.cached()
    told = subprocess.run(
        root.command("-c", "import platform; print(platform.machine())"),
        env=root.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "aarch64" != platform.machine()
    installed = {path.name for path in root.packages.iterdir()}
    assert {"torch", "transformers", "grpc"} <= installed
    assert not installed & set(WITHOUT)


def test_cluster_check_measures_the_board(cluster: Cluster) -> None:
    block = BenchmarkRequest(width=64, seconds=0.2)
    settings = CheckSettings(block=block, deadline_s=60.0, wake_s=DEADLINE_S)
    found = check_cluster(cluster.config, settings, lambda _: None)
    assert not found.faults
    board = found.members[1 + ARM]
    assert board.name == "d1" and board.speed_flop_per_s > 1e6


@pytest.mark.parametrize("model_type", ["bert", "marian"])
def test_a_round_of_two_architectures_is_that_of_one(cluster: Cluster, model_type: str) -> None:
    splitter = make_splitter(model_type, dropout=0.1)
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, CUT, count=4)
    losses, mixed, _ = trained(cluster, splitter, weights, steps)
    alike = train_split(splitter, weights, CUT, steps, ADAMW, dropout_seed=3)
    print(apart(mixed, alike[1]))
    assert losses == near(alike[0])
    assert_near(mixed, alike[1], depth=len(steps))
    assert largest_difference(mixed, weights) > 1e-3


def test_a_board_that_is_killed_and_rejoins_changes_nothing(cluster: Cluster) -> None:
    """The rest trains on without it; the next round has it again."""
    splitter = make_splitter("bert", dropout=0.0)
    weights = splitter.initial_weights(seed=2)
    steps = steps_of(splitter, CUT, count=4)
    board = cluster.daemons[ARM]
    assert isinstance(board, ArmBoard)
    begun = itertools.count()

    def killing() -> None:
        if next(begun) == 3:
            board.process.kill()

    whole_losses, whole = train_whole(splitter, weights, steps, ADAMW)
    losses, survived, result = trained(cluster, splitter, weights, steps, killing, every=2)
    (incident,) = result.incidents
    assert incident.lost == ("A/d1",) and "A/d1" not in result.plan.device_ids
    print(apart(survived, whole))
    assert losses == near(whole_losses)
    assert_near(survived, whole, depth=len(steps))
    board.restart()
    losses, rejoined, result = trained(cluster, splitter, weights, steps)
    assert not result.incidents and "A/d1" in result.plan.device_ids
    print(apart(rejoined, whole))
    assert losses == near(whole_losses)
    assert_near(rejoined, whole, depth=len(steps))
