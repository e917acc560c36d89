"""Laws: wherever its edge is, a cluster trains the unsplit model; labels stay home on request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, train_round
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.profile import describe_cluster, describe_unknown_edges, profile_cluster
from collapipe_flwr.config.cluster_file import parse_cluster
from collapipe_flwr.config.privacy import PrivacyConfig
from collapipe_flwr.config.schema import EdgeConfig, TrainConfig, WorldConfig
from collapipe_flwr.core.domain import EdgeProfile
from collapipe_flwr.core.errors import ConfigError, ScheduleError
from collapipe_flwr.federation.client.pipeline_round import micro_batch
from collapipe_flwr.federation.client.site import Site
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.records import SplitTask
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.simulation.setting import ModelShape
from collapipe_flwr.transport.client import Dialer
from tests.closeness import assert_near, near
from tests.cluster.test_killed_processes import striking
from tests.rounds import (
    ADAMW,
    Cut,
    make_splitter,
    steps_of,
    train_whole,
)
from tests.thorough import few

CUT = Cut(stops=(2, 5), micro_batches=(3, 2), schedule="1f1b")
STEPS = 2
SEVERAL = {
    "the first of three": "first",
    "the second of three": "second",
    "a device of three": "d2",
    "the control unit of three": "control-unit",
}
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
        self._ends: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Reach nobody new; who is connected stays so."""
        self._listener.close()

    def cut(self) -> None:
        """As if the host had died."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        host, _, port = self.target.rpartition(":")
        while True:
            try:
                near_end, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection((host, int(port)))
            self._ends += [near_end, far]
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
    edge: str = ""  # that the plan has
    result: ClusterResult | None = None

    @property
    def seen(self) -> bytes:
        return b"".join(bytes(tap.seen) for tap in self.taps)


@contextmanager
def place(name: str) -> Iterator[Place]:
    """A cluster of two devices whose edge is at this place."""
    with ExitStack() as stack:
        train = TrainConfig(threads=1, compute="cpu")

        def host(service: HostService) -> Tap:
            server = stack.enter_context(HostServer("127.0.0.1:0", service))
            tap = Tap(server.address)
            stack.callback(tap.close)
            return tap

        edge = host(HostService())
        if name.startswith("threads"):
            world = WorldConfig(devices=(("raspberry-pi-4", "raspberry-pi-5"),))
            described = partial(describe_cluster, world, 0)
            site = Site(index=0, edge=EdgeConfig(), cluster=None, simulated=described, train=train)
            yield Place(site, "" if name == "threads alone" else edge.address, (edge,))
            return
        count = 3 if name == "a device" or name.endswith("of three") else 2
        boards = [host(HostService(connect=Dialer(name=f"d{n}"))) for n in range(count)]
        devices = [{"name": f"d{n}", "address": tap.address} for n, tap in enumerate(boards)]
        named = {
            "a host": {"address": edge.address},
            "the control unit": {"name": "control-unit"},
            "a device": {"name": "d2"},
        }
        values = {"id": "A", "device": devices}
        if name in named:
            values["edge"] = named[name]
        elif name.endswith("of three"):
            spare = host(HostService())
            places = [("first", edge.address), ("second", spare.address), ("d2", "")]
            tables = [{"name": edge, "address": address} for edge, address in places]
            values["edge"] = [*tables, {"name": "control-unit"}]
            boards = [edge, spare, *boards]
        cluster = parse_cluster(values, Path())
        described = partial(profile_cluster, cluster)
        site = Site(index=0, edge=EdgeConfig(), cluster=cluster, simulated=described, train=train)
        run_s = edge.address if name == "the run's" else ""
        yield Place(site, run_s, (edge, *boards), SEVERAL.get(name, ""))


def train(
    at: Place, splitter: Splitter, weights: dict[str, Tensor], steps, **learning
) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    settings = LearningSettings(optimizer=ADAMW, deadline_s=20.0, heartbeat=None, **learning)
    task = SplitTask(
        model_spec_json=splitter.spec.to_json(), edge_address=at.address, learning=settings
    )
    plan = replace(CUT.plan(), edge=at.edge)
    order = TrainingOrder(plan=plan, weights=weights, learning=settings, server_round=1)
    batches = [[micro_batch(splitter, batch) for batch in step] for step in steps]
    with at.site.devices(task, splitter) as (fleet, recovery):
        result = train_round(splitter, order, batches, fleet, recovery=recovery)
    assert [report.name for report in result.reports][-1] == "edge"
    at.result = result
    return result.losses, {**result.weights}


@pytest.fixture(scope="module")
def splitter() -> Splitter:
    return make_splitter("marian", dropout=0.0)


@pytest.fixture(scope="module")
def whole(splitter: Splitter):
    weights = splitter.initial_weights(seed=1)
    steps = steps_of(splitter, CUT, count=STEPS)
    return weights, steps, train_whole(splitter, weights, steps, ADAMW)


@pytest.mark.parametrize(
    ("name", "every"),
    few(
        ((name, every) for name in (*PLACES, *SEVERAL) for every in (0, 1)), 1, 3, 4, 8, 11, 18, 20
    ),
)
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


@pytest.mark.parametrize("name", few(["a host", "a device", "the control unit"], 1))
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


@pytest.mark.parametrize("every", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_edge_that_dies_is_replaced_by_the_next_and_nothing_is_lost(
    splitter: Splitter, whole, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collapipe_flwr.cluster.edges.SPARE_S", 0.2)
    weights, steps, (losses, expected) = whole
    with place("the first of three") as at, striking("backward", 1, at.taps[0].cut) as struck:
        found, trained = train(at, splitter, weights, steps, snapshot_every=every)
    assert struck and at.result is not None
    assert at.result.plan.edge == "second"
    assert at.result.incidents[-1].lost == ("first",)
    assert at.result.incidents[-1].from_step == every
    assert "the edge first is lost, continues on second" in str(at.result.incidents[-1])
    assert list(at.result.quarantined) == ["first"]
    assert found == near(losses)
    assert_near(trained, expected)
    with place("the second of three") as undisturbed:
        again = train(undisturbed, splitter, weights, steps, snapshot_every=every)
    assert found == again[0]
    assert all(torch.equal(trained[key], again[1][key]) for key in again[1])


def demanding(at: Place, **demands) -> Place:
    """The site whose cluster file demands this; its server knows nothing of it."""
    cluster = replace(at.site.cluster, privacy=PrivacyConfig(**demands))
    return replace(at, edge="", site=replace(at.site, cluster=cluster))


@pytest.mark.parametrize("by", ["the run", "the site"])
def test_labels_at_home_have_no_other_edge(splitter: Splitter, whole, by: str) -> None:
    weights, steps, (losses, expected) = whole
    with place("the first of three") as at:
        home, asked = replace(at, edge=""), {"labels_at_home": True}
        if by == "the site":
            home, asked = demanding(at, labels="home"), {}
        found, trained = train(home, splitter, weights, steps, **asked)
        assert not [row for row in rows_of(steps) if row in at.seen]
    assert found == near(losses)
    assert_near(trained, expected)


def test_a_server_is_refused_what_a_site_forbids(splitter: Splitter, whole) -> None:
    """Before any host hears of it."""
    weights, steps, _ = whole
    with place("the first of three") as at:
        for demands, told in (
            ({"labels": "home"}, "has its head on the edge 'first', but the control unit is"),
            ({"trusted_blocks": 1}, "gives blocks below privacy.trusted-blocks=1 to A/d0, which"),
        ):
            site = replace(demanding(at, **demands), edge="first")
            with pytest.raises(ScheduleError, match=told):
                train(site, splitter, weights, steps)
        assert not at.seen


@pytest.mark.parametrize(("own", "runs"), [(2, 1), (1, 2)])
def test_of_the_blocks_that_a_site_and_a_run_keep_the_more_count(own: int, runs: int) -> None:
    model = ModelShape(blocks=4, width=64).profile()
    with place("the control unit") as at:
        site = demanding(at, trusted_blocks=own).site
        planned = Planning(trusted_blocks=runs).described(site.profile(10), model)
        assert planned.trusted_blocks == 2
        task = SplitTask(
            model_spec_json="", edge_address="", learning=LearningSettings(trusted_blocks=runs)
        )
        with site.devices(task, splitter) as (_, recovery):
            assert recovery.profile.trusted_blocks == 2


def test_a_plan_prices_the_edge_that_a_round_will_have() -> None:
    """One that the file names, else that of the run, else the control unit."""
    model = ModelShape(blocks=4, width=64).profile()
    values = {"id": "A", "device": [{"name": "d0", "address": "d0:1"}]}

    def edge_of(planning: Planning, **edge: object) -> EdgeProfile:
        cluster = parse_cluster({**values, "edge": edge}, Path())
        planned = planning.described(profile_cluster(cluster, 10), model)
        assert planned.edge is not None
        return planned.edge

    unit = profile_cluster(parse_cluster(values, Path()), 10).control_unit
    home = edge_of(Planning())
    assert home.device_id == unit.device_id
    assert home.speed_flop_per_s == unit.speed_flop_per_s
    assert home.memory_bytes < unit.memory_bytes
    assert edge_of(Planning(edge_address="run:1")).name == "run:1"
    ours = edge_of(Planning(edge_address="run:1"), address="ours:1")
    assert (ours.name, ours.device_id) == ("ours:1", "")


def test_what_is_assumed_of_an_edge_is_said_in_one_line() -> None:
    devices = [{"name": name, "address": f"{name}:1"} for name in ("d0", "d1")]
    values = {"id": "A", "device": devices}
    for edge, lines in (({}, 0), ({"address": "e:1"}, 1), ({"name": "d0"}, 0)):
        found = describe_unknown_edges(parse_cluster({**values, "edge": edge}, Path()))
        assert len(found) == lines
        assert all("nothing is known of the edge edge at e:1" in line for line in found)
    known = {**values, "edge": {"address": "e:1", "speed-gflop-per-s": 3}}
    assert not describe_unknown_edges(parse_cluster(known, Path()))


def test_an_edge_that_is_the_only_device_is_refused() -> None:
    values = {"id": "A", "device": [{"name": "d0", "address": "d0:1"}], "edge": {"name": "d0"}}
    with pytest.raises(ConfigError, match=r"\[edge\] names 'd0', the only device"):
        parse_cluster(values, Path())


def test_a_device_that_is_the_edge_holds_no_block_unless_labels_stay_at_home() -> None:
    devices = [{"name": f"d{n}", "address": f"d{n}:1"} for n in range(3)]
    cluster = parse_cluster({"id": "A", "device": devices, "edge": {"name": "d1"}}, Path())
    profile = profile_cluster(cluster, 10)
    assert profile.edge is not None and profile.edge.name == "d1:1"
    model = ModelShape(blocks=2, width=64).profile()

    def holding(planning: Planning) -> list[str]:
        (planned,) = planning.world([profile], model).snapshot(1, model).clusters
        return [device.device_id for device in planned.profile.devices]

    assert holding(Planning()) == ["A/d0", "A/d2"]
    assert holding(Planning(labels_at_home=True)) == ["A/d0", "A/d1", "A/d2"]
