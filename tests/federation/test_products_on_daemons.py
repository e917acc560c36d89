"""Clusters of different ranks on the daemons of a cluster file, one of which is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr import Cluster, CollaPipe, LocalGrid, SplitModel
from collapipe_flwr.federation.records import read_assignment
from collapipe_flwr.host.server import HostServer
from tests.closeness import assert_near
from tests.federation.test_library_daemons import serving
from tests.federation.test_products import (
    ALONE,
    BATCH,
    LENGTH,
    RANK,
    RULE,
    as_products,
    begun,
    client,
    loader,
    new_model,
    pytestmark,
)

__all__ = ["pytestmark"]
BOARDS, SMALL = ("board-1", "board-2"), 2
FILE = f'id = "shed"\nlora-rank = {SMALL}\n[control-unit]\nname = "shed-cu"\n'


def test_a_device_lost_in_a_cluster_of_another_rank_changes_no_product(
    base: str, tmp_path: Path
) -> None:
    records = list[Any]()
    undisturbed = train(base, {1: client(), 2: client()}, {1: {"lora-rank": SMALL}, 2: {}})
    file = tmp_path / "shed.toml"
    with serving(BOARDS, file, FILE) as hosts:
        apps = {1: app_that_loses(hosts), 2: client()}
        found = train(base, apps, {1: {"cluster": str(file)}, 2: {}}, on_round=records.append)
    told = records[0].telemetry["shed"]
    assert len(told.incidents) == 1 and told.replanned is not None
    assert_near(as_products(found, RANK), as_products(undisturbed, RANK))


def train(
    base: str, apps: dict[int, ClientApp], configs: dict[int, Any], **given: Any
) -> dict[str, Any]:
    model = new_model(base)
    strategy = CollaPipe(
        FedAvg(**ALONE, min_available_nodes=2),
        model=SplitModel(model, batch_size=BATCH, length=LENGTH, aggregate="products"),
        optimizer=RULE,
        on_total_failure="raise",
        **given,
    )
    grid = LocalGrid(apps, node_configs=configs)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(begun(model)), num_rounds=1)
    return result.arrays.to_torch_state_dict()


def app_that_loses(hosts: dict[str, HostServer]) -> ClientApp:
    """A device of the plan is gone after the first batch."""
    app = ClientApp()
    cluster = Cluster(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        device_id = read_assignment(message.content).plan.segments[0].device_id

        def losing():
            for number, batch in enumerate(loader(context.node_id)):
                if number == 1:
                    hosts[device_id.removeprefix("shed/")].stop(0.0)
                yield batch

        return cluster.train(message, context, losing())

    return app
