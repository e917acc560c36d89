"""Who may call what: every role has what its work needs, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from collapipe_flwr.config.access_control import AccessControl, Caller, access_control
from collapipe_flwr.config.cluster_file import ClusterConfig, Role, parse_cluster
from collapipe_flwr.core.errors import ConfigError


def cluster(name: str, *devices: str, **tables: dict[str, str]) -> ClusterConfig:
    values = {
        "id": name,
        "control-unit": {"name": f"cu-{name}"},
        "device": [{"name": device, "address": f"{device}:1"} for device in devices],
        **tables,
    }
    return parse_cluster(values, Path("."))


@pytest.fixture
def access() -> AccessControl:
    return access_control([cluster("g", "g1", "g2"), cluster("w", "w1")], allow=["laptop"])


def caller(access: AccessControl, name: str) -> Caller:
    return access.callers[name]


def test_edge_and_server_belong_to_all_clusters_and_others_to_one(access: AccessControl) -> None:
    assert caller(access, "server").clusters == {"g", "w"}
    assert caller(access, "edge").role is Role.EDGE
    assert caller(access, "g1").clusters == {"g"}
    assert "stranger" not in access.callers


@pytest.mark.parametrize(
    ("name", "on_device", "on_edge"),
    [
        ("cu-g", {"OpenSession", "PushWeights", "Stream", "Echo"}, {"OpenSession", "Stream"}),
        ("g1", {"Stream", "Echo", "Status"}, {"Stream", "Echo", "Status"}),
        ("server", {"Echo", "Status"}, {"Echo", "Status", "Progress"}),
        ("edge", {"Echo", "Status"}, {"Echo", "Status"}),
        ("laptop", {"OpenSession", "Stream"}, {"OpenSession", "Stream"}),
    ],
)
def test_a_role_may_call_what_its_work_needs(access, name, on_device, on_edge) -> None:
    who = caller(access, name)
    assert all(who.may_call(method, on_edge=False) for method in on_device)
    assert all(who.may_call(method, on_edge=True) for method in on_edge)


@pytest.mark.parametrize("on_edge", [False, True])
@pytest.mark.parametrize("method", ["OpenSession", "PushWeights", "FetchWeights", "Benchmark"])
def test_only_a_control_unit_gives_orders(access, method, on_edge) -> None:
    for name in ("g1", "server", "edge"):
        assert not caller(access, name).may_call(method, on_edge=on_edge)


def test_how_far_rounds_are_is_asked_of_the_edge_by_the_server(access: AccessControl) -> None:
    assert not caller(access, "server").may_call("Progress", on_edge=False)
    for name in ("g1", "edge"):
        assert not caller(access, name).may_call("Progress", on_edge=True)


def test_a_session_is_its_clusters_and_its_openers(access: AccessControl) -> None:
    place = {"cluster_id": "g", "opener": "cu-g"}
    for name in ("cu-g", "g1", "laptop"):
        assert caller(access, name).may_use("Stream", **place)
    for name in ("cu-w", "w1"):
        assert not caller(access, name).may_use("Stream", **place)
    assert caller(access, "cu-g").may_use("FetchWeights", **place)
    assert not caller(access, "cu-g").may_use("FetchWeights", cluster_id="g", opener="laptop")
    assert not caller(access, "cu-w").may_use("FetchWeights", cluster_id="g", opener="cu-w")


def test_a_control_unit_opens_sessions_for_its_own_cluster(access: AccessControl) -> None:
    assert caller(access, "cu-g").cluster_of("") == "g"
    assert caller(access, "cu-g").cluster_of("g") == "g"
    assert caller(access, "laptop").cluster_of("w") == "w"
    with pytest.raises(ConfigError, match="cu-g opens no session for the cluster w"):
        caller(access, "cu-g").cluster_of("w")


def test_a_certificate_opens_one_cluster_only() -> None:
    with pytest.raises(ConfigError, match="'g1' is a member of g and of w: names must differ"):
        access_control([cluster("g", "g1"), cluster("w", "g1")])
    with pytest.raises(ConfigError, match="two cluster files have the id 'g'"):
        access_control([cluster("g", "g1"), cluster("g", "g2", edge={"name": "edge"})])
