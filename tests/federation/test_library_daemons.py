"""A user's model on the daemons of a cluster file, one of which is lost within a round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from collapipe_flwr import Cluster, CollaPipe, LocalGrid
from collapipe_flwr.federation.records import read_assignment
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.transport.client import Dialer
from tests.federation.test_library import (
    RULE,
    assert_close,
    loader,
    new_model,
    split,
    train_plainly,
)

NODE = 1
BOARDS = ("board-1", "board-2", "board-3")
FILE = 'id = "shed"\n[control-unit]\nname = "shed-cu"\n'
DEVICE = '[[device]]\nname = "{}"\naddress = "{}"\n'


def test_a_device_that_is_lost_within_a_round_costs_no_step(tmp_path: Path) -> None:
    records = []
    file = tmp_path / "shed.toml"
    with serving(BOARDS, file, FILE) as hosts:
        grid = LocalGrid({NODE: app_that_loses(hosts)}, node_configs={NODE: {"cluster": str(file)}})
        strategy = CollaPipe(
            FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
            model=split(),
            optimizer=RULE,
            on_round=records.append,
            on_total_failure="raise",
        )
        start = ArrayRecord(new_model().state_dict())
        found = strategy.start(grid=grid, initial_arrays=start, num_rounds=1).arrays
    told = records[0].telemetry["shed"]
    assert len(told.incidents) == 1 and told.replanned is not None
    model = new_model()
    train_plainly(model, NODE)
    for key, tensor in model.state_dict().items():
        assert_close(found.to_torch_state_dict()[key], tensor, key)


@contextmanager
def serving(boards: Iterable[str], file: Path, head: str) -> Iterator[dict[str, HostServer]]:
    """Serve devices of these names; ``file`` becomes a cluster file of ``head`` and them."""
    with ExitStack() as stack:
        hosts = {
            name: stack.enter_context(
                HostServer("127.0.0.1:0", HostService(connect=Dialer(name=name)))
            )
            for name in boards
        }
        file.write_text(head + "".join(DEVICE.format(n, h.address) for n, h in hosts.items()))
        yield hosts


def app_that_loses(hosts: dict[str, HostServer]) -> ClientApp:
    app = ClientApp()
    cluster = Cluster(app)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        plan = read_assignment(message.content).plan
        return cluster.train(message, context, losing(hosts, plan.segments[0].device_id))

    return app


def losing(hosts: dict[str, HostServer], device_id: str) -> Iterator[dict]:
    """The node's batches; a device is gone after the first."""
    for number, batch in enumerate(loader(NODE)):
        if number == 1:
            hosts[device_id.removeprefix("shed/")].stop(0.0)
        yield batch
