"""Waiting for clusters ends in time and says what is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.clientapp import ClientApp

from collapipe_flwr.core.domain import ClusterProfile, DeviceProfile
from collapipe_flwr.core.errors import RunError
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.members import discover_clusters
from collapipe_flwr.federation.planner import (
    DescribedClusters,
)
from collapipe_flwr.federation.planning import Planning
from collapipe_flwr.federation.records import write_profile, write_spare
from tests.federation.test_planner import MODEL

DEVICE = DeviceProfile(
    device_id="d1",
    kind="phone",
    speed_flop_per_s=1e9,
    memory_bytes=2**30,
    energy_per_flop_j=1e-10,
    tx_power_max_w=0.2,
    energy_budget_j=1.0,
)


def profile(name: str) -> ClusterProfile:
    return ClusterProfile(
        cluster_id=name,
        examples=10,
        control_unit=replace(DEVICE, device_id="cu"),
        devices=(DEVICE,),
        d2d_bandwidth_hz=1e6,
        server_rate_bit_per_s=1e8,
    )


def cluster(name: str, **other) -> ClientApp:
    app = ClientApp()

    @app.query("describe")
    def describe(message, context):
        del context
        return Message(write_profile(replace(profile(name), **other)), reply_to=message)

    return app


def spare(message, context):
    del context
    return Message(write_spare(), reply_to=message)


class Clock:
    """Time that passes only while one waits; a node may join on the way."""

    def __init__(self, join=lambda: None) -> None:
        self.t = 0.0
        self.join = join

    def pause(self, seconds: float) -> None:
        self.t += seconds
        if self.t >= 5.0:
            self.join()


def find(grid, expected=2, clock=None):
    clock = clock or Clock()
    return discover_clusters(
        grid, expected=expected, timeout_s=60.0, now=lambda: clock.t, pause=clock.pause
    )


def test_every_cluster_describes_itself():
    found = find(LocalGrid({8: cluster("b"), 3: cluster("a")}))
    assert found == {3: profile("a"), 8: profile("b")}


def test_a_cluster_that_joins_late_is_waited_for():
    grid = LocalGrid({3: cluster("a")})
    assert len(find(grid, clock=Clock(lambda: grid.add(8, cluster("b"))))) == 2


def test_the_wait_ends_at_its_deadline_and_names_what_is_missing():
    clock = Clock()
    words = r"2 clusters expected \(run-config `clusters`\), 1 connected after 60 s"
    with pytest.raises(RunError, match=words):
        find(LocalGrid({3: cluster("a")}), clock=clock)
    assert clock.t == pytest.approx(60.0)


def test_a_spare_node_is_no_cluster_whenever_it_connects():
    assert find(LocalGrid({3: spare, 8: cluster("b")}), expected=1) == {8: profile("b")}
    grid = LocalGrid({3: spare})
    clock = Clock(lambda: grid.add(8, cluster("b")))
    assert find(grid, expected=1, clock=clock) == {8: profile("b")}
    words = r"1 clusters expected .*, 0 connected after 60 s \(1 more have a partition-id of 1 or"
    with pytest.raises(RunError, match=words):
        find(LocalGrid({3: spare}), expected=1)


def test_a_node_that_is_gone_is_passed_over_and_its_successor_waited_for():
    def gone(message, context):
        del context
        return Message(Error(code=5, reason="no heartbeat"), reply_to=message)

    grid = LocalGrid({3: gone})
    clock = Clock(lambda: grid.add(8, cluster("b")))
    assert find(grid, expected=1, clock=clock) == {8: profile("b")}
    assert find(LocalGrid({3: gone, 8: cluster("b")}), expected=1) == {8: profile("b")}
    with pytest.raises(RunError, match=r"1 clusters expected .*, 0 connected after 60 s: start"):
        find(LocalGrid({3: gone}), expected=1)


def test_zero_clusters_are_refused():
    with pytest.raises(RunError, match="at least 1 cluster"):
        find(LocalGrid({}), expected=0)


def broken(*_):
    raise ValueError("cluster.toml has no device d2")


def test_a_cluster_that_cannot_start_says_why():
    with pytest.raises(RunError, match=r"node 8 cannot start: .*cluster\.toml has no device d2"):
        find(LocalGrid({3: cluster("a"), 8: broken}))


def plain(message, context):
    del context
    return Message(RecordDict(), reply_to=message)


def test_an_unmodified_client_is_told_apart():
    with pytest.raises(RunError, match="node 3 gave no usable description"):
        find(LocalGrid({3: plain}), expected=1)


@pytest.mark.parametrize("other", [broken, cluster("a"), plain])
def test_a_node_that_cannot_take_part_is_left_out_where_enough_others_can(other, caplog):
    grid = LocalGrid({3: cluster("a"), 8: other, 9: cluster("b")})
    assert find(grid) == {3: profile("a"), 9: profile("b")}
    assert "the run starts without it" in caplog.text


def test_two_clusters_of_one_name_are_refused():
    with pytest.raises(RunError, match="nodes 3 and 8 both call their cluster 'a'"):
        find(LocalGrid({3: cluster("a"), 8: cluster("a")}))


def test_the_first_of_two_nodes_keeps_a_name_while_it_is_there(caplog):
    grid = LocalGrid({3: cluster("a"), 8: cluster("a")})
    planner = DescribedClusters(Planning(), lambda: MODEL)
    for _ in range(2):
        assert planner.query_unknown(grid, [3, 8])
        assert planner._names == {3: "a"}
    assert "nodes 3 and 8 both call their cluster 'a'" in caplog.text
    grid.remove(3)
    planner.query_unknown(grid, [8])
    assert planner._names == {8: "a"}


def test_a_cluster_that_is_back_as_another_node_keeps_its_name():
    grid = LocalGrid({3: cluster("a"), 8: cluster("b")})
    planner = DescribedClusters(Planning(), lambda: MODEL)
    planner.query_unknown(grid, [3, 8])
    grid.remove(3)
    grid.add(9, cluster("a"))
    planner.query_unknown(grid, [8, 9])
    assert planner._names == {8: "b", 9: "a"}


def test_a_cluster_that_is_back_with_other_devices_is_planned_with_these():
    grid = LocalGrid({3: cluster("a"), 8: cluster("b")})
    planner = DescribedClusters(Planning(), lambda: MODEL)
    planner.query_unknown(grid, [3, 8])
    grid.remove(3)
    grid.add(9, cluster("a", devices=(replace(DEVICE, device_id="d2"),)))
    planner.query_unknown(grid, [8, 9])
    plan = planner.plan(1, [8, 9]).plan
    assert plan is not None
    assert [c.device_ids for c in plan.clusters] == [("d2",), ("d1",)]


def test_clusters_keep_their_places_when_another_one_joins():
    grid = LocalGrid({3: cluster("a"), 8: cluster("c")})
    planner = DescribedClusters(Planning(), lambda: MODEL)
    planner.query_unknown(grid, [3, 8])
    before = planner.world.snapshot(1, MODEL)
    grid.add(9, cluster("b"))
    planner.query_unknown(grid, [3, 8, 9])
    after = planner.world.snapshot(2, MODEL)
    assert [c.profile.cluster_id for c in after.clusters] == ["a", "b", "c"]
    assert (after.clusters[0], after.clusters[2]) == before.clusters


def test_silence_is_an_error():
    class Deaf(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            del timeout
            return super().send_and_receive(list(messages)[:1])

    with pytest.raises(RunError, match="node 8 did not describe its cluster within 60 s"):
        find(Deaf({3: cluster("a"), 8: cluster("b")}))
