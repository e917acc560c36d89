"""Devices that join or are removed during a run: planned from the next round on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr import Cluster, CollaPipe, LocalGrid
from collapipe_flwr.core.domain import ClusterPlan, DeviceProfile
from collapipe_flwr.core.json_codec import from_json, to_json
from collapipe_flwr.core.outcome import RoundOutcome
from collapipe_flwr.federation.round import RoundRecord
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.transport.client import Dialer
from tests.federation.test_absent_devices import CLUSTERS, devices_of
from tests.federation.test_library import RULE, loader, new_model, split
from tests.federation.test_planner import closed, rounds, told, weights

NODE = 1
BOARDS = ("board-1", "board-2", "board-3")
FILE = 'id = "shed"\nversion = {}\n[control-unit]\nname = "shed-cu"\n'
DEVICE = '[[device]]\nname = "{}"\naddress = "{}"\n'


def settle(
    planner, planned, *devices: DeviceProfile, ended: ClusterPlan | None = None
) -> RoundOutcome:
    """Both clusters replied; the first one has these devices now, and ended by that plan."""
    profiles = {c.cluster_id: c for c in planner.world.clusters}
    now = replace(profiles["cluster-0"], devices=devices)
    telemetry = {name: told(name) for name in CLUSTERS}
    telemetry["cluster-0"] = replace(telemetry["cluster-0"], profile=now, replanned=ended)
    done = closed(planned, *CLUSTERS, after=weights(0.5))
    return planner.settle(replace(done, telemetry=telemetry))


def test_a_device_that_joined_or_went_counts_from_the_next_round_on() -> None:
    for policy in ("dssda", "uniform", "throughput"):
        planner = rounds(policy)
        planned = planner.plan(1, [11, 12])
        first, second = planner.world.clusters[0].devices
        third = replace(first, device_id="cluster-0/d3")
        before = planner.world.placements[0].member_m.copy()
        settle(planner, planned, first, second, third)
        assert (planner.world.placements[0].member_m[:3] == before).all()
        planned = planner.plan(2, [11, 12])
        if policy == "uniform":
            assert "cluster-0/d3" in devices_of(planned, 11)
        settle(planner, planned, third)
        planned = planner.plan(3, [11, 12])
        assert devices_of(planned, 11) == {"cluster-0/d3"}
        assert devices_of(planned, 12) <= {"cluster-1/d1", "cluster-1/d2"}
        settle(planner, planned, third)
        assert planner.plan(4, [11, 12]).takes_part(11)


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("policy", ["dssda", "uniform"])
def test_a_round_may_end_on_a_device_that_replaced_another_since_its_plan(
    policy: str, described: bool
) -> None:
    planner = rounds(policy)
    planned = planner.plan(1, [11, 12])
    plan, devices = planned.cluster_plan(11), planner.world.clusters[0].devices
    lost = next(device for device in devices if device.device_id in plan.device_ids)
    third = replace(lost, device_id="cluster-0/d3")
    now = [*(device for device in devices if device != lost), *([third] if described else [])]
    text = to_json(plan).replace(f'"{lost.device_id}"', '"cluster-0/d3"')
    outcome = settle(planner, planned, *now, ended=from_json(ClusterPlan, text, "plan"))
    spent_j = outcome.energy_j["cluster-0"]
    assert spent_j["cluster-0/d3" if described else lost.device_id] > 0
    assert (spent_j[lost.device_id] > 0) != described
    assert list(planner.world.clusters[0].devices) == now
    assert planner.plan(2, [11, 12]).takes_part(11)


def test_a_run_takes_up_a_newcomer_and_lets_go_of_a_removed_device(tmp_path: Path) -> None:
    records: list[RoundRecord] = []
    file = tmp_path / "shed.toml"
    with ExitStack() as stack:
        hosts = {
            name: stack.enter_context(
                HostServer("127.0.0.1:0", HostService(connect=Dialer(name=name)))
            )
            for name in BOARDS
        }

        def write(version: int, *names: str) -> None:
            devices = "".join(DEVICE.format(name, hosts[name].address) for name in names)
            file.write_text(FILE.format(version) + devices)

        def batches(server_round: int) -> Iterator[dict]:
            for number, batch in enumerate(loader(NODE)):
                if number == 1 and server_round == 1:
                    write(2, *BOARDS)
                if number == 1 and server_round == 2:
                    write(3, "board-2", "board-3")
                    hosts["board-1"].stop(0.0)  # as a daemon that hears that it was removed
                yield batch

        app = ClientApp()
        cluster = Cluster(app)

        @app.train()
        def train(message: Message, context: Context) -> Message:
            return cluster.train(message, context, batches(len(records) + 1))

        write(1, "board-1")
        strategy = CollaPipe(
            FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
            model=split(),
            optimizer=RULE,
            scheduler="uniform",
            on_round=records.append,
            on_total_failure="raise",
        )
        grid = LocalGrid({NODE: app}, node_configs={NODE: {"cluster": str(file)}})
        start = ArrayRecord(new_model().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=3)
    planned = [set(r.plan.find_cluster("shed").device_ids) for r in records]
    assert planned[0] == {"shed/board-1"} and "shed/board-3" in planned[1]
    assert "shed/board-1" in planned[1] and "shed/board-1" not in planned[2]
    executed = records[1].executed("shed")
    assert executed is not None and "shed/board-1" not in executed.device_ids
    assert not records[2].telemetry["shed"].incidents


def test_a_device_that_was_removed_between_rounds_costs_no_round(tmp_path: Path) -> None:
    records: list[RoundRecord] = []
    file = tmp_path / "shed.toml"
    with ExitStack() as stack:
        hosts = {
            name: stack.enter_context(
                HostServer("127.0.0.1:0", HostService(connect=Dialer(name=name)))
            )
            for name in BOARDS[:2]
        }

        def write(version: int, *names: str) -> None:
            devices = "".join(DEVICE.format(name, hosts[name].address) for name in names)
            file.write_text(FILE.format(version) + devices)

        app = ClientApp()
        cluster = Cluster(app)

        @app.train()
        def train(message: Message, context: Context) -> Message:
            return cluster.train(message, context, loader(NODE))

        def on_round(record: RoundRecord) -> None:
            records.append(record)
            write(2, "board-2")

        write(1, *BOARDS[:2])
        strategy = CollaPipe(
            FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
            model=split(),
            optimizer=RULE,
            scheduler="uniform",
            on_round=on_round,
            on_total_failure="raise",
        )
        grid = LocalGrid({NODE: app}, node_configs={NODE: {"cluster": str(file)}})
        start = ArrayRecord(new_model().state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=3)
    used = [set(r.executed("shed").device_ids) for r in records]
    assert used == [{"shed/board-1", "shed/board-2"}, {"shed/board-2"}, {"shed/board-2"}]
    assert not records[2].telemetry["shed"].incidents


def test_a_board_that_was_replaced_under_its_name_counts_as_it_is_from_the_next_round_on() -> None:
    planner = rounds("uniform")
    planned = planner.plan(1, [11, 12])
    first, second = planner.world.clusters[0].devices
    assert devices_of(planned, 11) == {first.device_id, second.device_id}
    tiny = replace(second, memory_bytes=second.memory_bytes // 10_000)
    settle(planner, planned, first, tiny)
    assert planner.world.clusters[0].devices[1].memory_bytes == tiny.memory_bytes
    planned = planner.plan(2, [11, 12])
    assert "cluster-0" in planned.left_out["cluster-0"] and planned.takes_part(12)
    joint = rounds("dssda")
    settle(joint, joint.plan(1, [11, 12]), first, tiny)
    assert devices_of(joint.plan(2, [11, 12]), 11) == {first.device_id}
