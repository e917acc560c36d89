"""Laws: wherever its edge is, a cluster trains the unsplit model; labels stay home on request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.order import LearningSettings, RoundOrder
from collapipe_flwr.cluster.profile import describe_cluster, profile_of
from collapipe_flwr.config.cluster_file import parse_cluster
from collapipe_flwr.config.schema import EdgeConfig, TrainConfig, WorldConfig
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.federation.client.pipeline_round import micro_batch
from collapipe_flwr.federation.client.site import Site
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.host.server import EdgeServer
from collapipe_flwr.host.service import EdgeService
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.transport.client import Dialer
from tests.closeness import assert_near, near
from tests.laws.test_cluster_equals_whole import (
    ADAMW,
    Cut,
    _one_thread,
    _steps,
    _train_unsplit,
    make_splitter,
)

__all__ = ["_one_thread"]
CUT = Cut(stops=(2, 5), micro_batches=(3, 2), schedule="1f1b")
STEPS = 2
PLACES = (
    "a host",
    "the run's",
    "the control unit",
    "the control unit by default",
    "a device",
    "threads",
    "threads alone",
)


@dataclass
class Tap:
    """Passes bytes on to a host, and keeps them."""

    target: str
    seen: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        host, _, port = self.target.rpartition(":")
        while True:
            try:
                near_end, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            for source, sink in ((near_end, far), (far, near_end)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(2**16):
                self.seen += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()


@dataclass
class Place:
    """A site, what the server says of its edge, and all that goes to the cluster's hosts."""

    site: Site
    address: str
    taps: tuple[Tap, ...] = ()

    @property
    def seen(self) -> bytes:
        return b"".join(bytes(tap.seen) for tap in self.taps)


@contextmanager
def place(name: str) -> Iterator[Place]:
    """A cluster of two devices whose edge is at this place."""
    with ExitStack() as stack:
        train = TrainConfig(threads=1, compute="cpu")

        def host(service: EdgeService) -> Tap:
            server = stack.enter_context(EdgeServer("127.0.0.1:0", service))
            tap = Tap(server.address)
            stack.callback(tap.close)
            return tap

        edge = host(EdgeService())
        if name.startswith("threads"):
            world = WorldConfig(devices=(("raspberry-pi-4", "raspberry-pi-5"),))
            described = partial(describe_cluster, world, 0)
            site = Site(index=0, edge=EdgeConfig(), cluster=None, simulated=described, train=train)
            yield Place(site, "" if name == "threads alone" else edge.address, (edge,))
            return
        count = 3 if name == "a device" else 2
        boards = [host(EdgeService(connect=Dialer(name=f"d{n}"))) for n in range(count)]
        devices = [{"name": f"d{n}", "address": tap.address} for n, tap in enumerate(boards)]
        named = {
            "a host": {"address": edge.address},
            "the control unit": {"name": "control-unit"},
            "a device": {"name": "d2"},
        }
        values = {"id": "A", "device": devices}
        if name in named:
            values["edge"] = named[name]
        cluster = parse_cluster(values, Path())
        described = partial(profile_of, cluster)
        site = Site(index=0, edge=EdgeConfig(), cluster=cluster, simulated=described, train=train)
        yield Place(site, edge.address if name == "the run's" else "", (edge, *boards))


def train(
    at: Place, splitter: Splitter, weights: dict[str, Tensor], steps, **learning
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    settings = LearningSettings(
        optimizer=ADAMW, schedule=CUT.schedule, deadline_s=20.0, heartbeat=None, **learning
    )
    task = SplitTask(
        model_spec_json=splitter.spec.to_json(), edge_address=at.address, learning=settings
    )
    order = RoundOrder(plan=CUT.plan(), weights=weights, learning=settings, server_round=1)
    batches = [[micro_batch(splitter, batch) for batch in step] for step in steps]
    with at.site.devices(task, splitter) as (fleet, recovery):
        result = train_round(splitter, order, batches, fleet, recovery=recovery)
    assert [report.name for report in result.reports][-1] == "edge"
    return result.losses, {**result.weights}


@pytest.fixture(scope="module")
def splitter() -> Splitter:
    return make_splitter("marian", dropout=0.0)


@pytest.fixture(scope="module")
def whole(splitter: Splitter):
    weights = splitter.initial_weights(seed=1)
    steps = _steps(splitter, CUT, count=STEPS)
    return weights, steps, _train_unsplit(splitter, weights, steps, ADAMW)


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("name", PLACES)
def test_the_edge_may_be_anywhere(splitter: Splitter, whole, name: str, every: int) -> None:
    weights, steps, (losses, expected) = whole
    with place(name) as at:
        found, trained = train(at, splitter, weights, steps, snapshot_every=every)
    assert found == near(losses)
    assert_near(trained, expected)


def rows_of(steps) -> list[bytes]:
    """Every example's labels as any link may carry them: 8, 4, 2 or 1 bytes each."""
    labels = [row for step in steps for batch in step for row in batch["labels"]]
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8)
    return [row.to(kind).numpy().tobytes() for row in labels for kind in kinds if row.min() > 0]


@pytest.mark.parametrize("name", ["a host", "a device", "the control unit"])
def test_labels_at_home_leave_on_no_link(splitter: Splitter, whole, name: str) -> None:
    weights, steps, (losses, expected) = whole
    with place(name) as at:
        found, trained = train(at, splitter, weights, steps, labels_at_home=True)
        assert len(at.seen) > 10_000
        assert not [row for row in rows_of(steps) if row in at.seen]
    assert found == near(losses)
    assert_near(trained, expected)


def test_labels_that_travel_are_seen(splitter: Splitter, whole) -> None:
    """So that the law above could fail."""
    weights, steps, _ = whole
    with place("a host") as at:
        train(at, splitter, weights, steps)
        assert [row for row in rows_of(steps) if row in at.seen]


def test_an_edge_that_is_the_only_device_is_refused() -> None:
    values = {"id": "A", "device": [{"name": "d0", "address": "d0:1"}], "edge": {"name": "d0"}}
    with pytest.raises(ConfigError, match=r"\[edge\] names 'd0', the only device"):
        parse_cluster(values, Path())


def test_a_device_that_is_the_edge_holds_no_block() -> None:
    devices = [{"name": f"d{n}", "address": f"d{n}:1"} for n in range(3)]
    cluster = parse_cluster({"id": "A", "device": devices, "edge": {"name": "d1"}}, Path())
    profile = profile_of(cluster, 10)
    assert [device.device_id for device in profile.devices] == ["A/d0", "A/d2"]
    assert profile.edge is not None and profile.edge.name == "d1:1"
    assert replace(cluster, edge=replace(cluster.edge, name="x")).workers == cluster.devices
