"""The cluster file: units, paths, and one sentence per mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from collapipe_flwr.cluster.profile import profile_cluster
from collapipe_flwr.config.cluster_file import (
    Role,
    format_cluster,
    list_certificate_hosts,
    parse_cluster,
    read_cluster,
)
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.links import CODECS

DEVICES = [
    {"name": "pi-1", "address": "10.0.0.11:50071", "speed-gflop-per-s": 9.5, "memory-mb": 1500},
    {"name": "pi-2", "address": "10.0.0.12:50071", "kind": "jetson-nano"},
]
FILE = """
id = "greenhouse"
measured = "found.json"
[control-unit]
name = "hub"
[[device]]
name = "pi-1"
address = "10.0.0.11:50071"
[edge]
address = "10.0.0.2:50061"
[links]
rate-mbit-per-s = 40
[tls]
ca = "keys/ca.pem"
"""


def test_a_file_names_members_addresses_and_certificates(tmp_path: Path) -> None:
    path = tmp_path / "greenhouse.toml"
    path.write_text(FILE)
    cluster = read_cluster(path)
    assert cluster.names == ("hub", "pi-1", "edge", "server")
    assert cluster.device_id(cluster.devices[0]) == "greenhouse/pi-1"
    assert cluster.links.rate_mbit_per_s == 40.0
    assert cluster.measured == tmp_path / "found.json"
    files = cluster.tls_files("pi-1")
    assert files is not None
    assert files.ca == tmp_path / "keys/ca.pem"
    assert files.key == tmp_path / "certs/pi-1.key"
    assert list_certificate_hosts([cluster])["pi-1"] == ()


def edges(*tables: dict, **more: object) -> dict:
    return {"id": "g", "device": DEVICES, "edge": list(tables), **more}


def test_several_edges_are_machines_devices_or_the_control_unit_in_order() -> None:
    spare = {"name": "spare", "address": "h:2"}
    cluster = parse_cluster(
        edges({"address": "h:1"}, spare, {"name": "pi-2"}, {"name": "control-unit"}), Path()
    )
    assert [edge.name for edge in cluster.edges] == ["edge", "spare", "pi-2", "control-unit"]
    assert cluster.edges[2] is cluster.devices[1]
    assert [member.name for member in cluster.list_in_role(Role.EDGE)] == ["edge", "spare"]
    assert parse_cluster(tomllib.loads(format_cluster(cluster)), Path()) == cluster
    assert parse_cluster(edges(spare), Path()) == parse_cluster(
        {"id": "g", "device": DEVICES, "edge": spare}, Path()
    )


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (edges({"address": "h:1"}, {"address": "h:2"}), "two members are called 'edge'"),
        (edges({"name": "pi-1"}, {"name": "pi-1"}), "two members are called 'pi-1'"),
        (
            edges({"address": "h:1"}, {"name": "e", "address": "h:1"}),
            "two members have the address",
        ),
        (edges({"address": "h:1"}, {"name": "e"}), r"\[\[edge\]\] 'e' has no address"),
        (edges({"address": "h:1"}, {"adress": "h:2"}), r"edge\[2\].adress"),
        (edges(), "edge must be a table"),
        (
            edges({"address": "h:1"}, {"name": "e", "address": "h:2"}, version=1),
            "'e' has no token to join by",
        ),
        (
            {**edges({"address": "h:1"}, {"name": "pi-1"}), "device": DEVICES[:1]},
            r"\[edge\] names 'pi-1', the only device",
        ),
        (
            {"device": DEVICES},
            "id must be a name of letters, digits, dots and dashes, 63 at most, got ''",
        ),
        ({"id": "a/b", "device": DEVICES}, "id must be a name .* got 'a/b'"),
        ({"id": "g"}, r"at least one \[\[device\]\] table"),
        ({"id": "g", "device": []}, r"at least one \[\[device\]\] table"),
        ({"id": "g", "device": [{"address": "h:1"}]}, r"device\[1\].name must be a name"),
        ({"id": "g", "device": [{"name": "d"}]}, r"device\[1\].address of d is missing"),
        (
            {"id": "g", "device": [{"name": "d", "address": "h"}]},
            r'device\[1\].address must read like "10.0.0.11:50071", got \'h\'',
        ),
        (
            {"id": "g", "device": [{"name": "d", "address": "h:1", "memory-mb": -1}]},
            r"device\[1\].memory-mb must be at least 0, got -1.0",
        ),
        (
            {"id": "g", "device": [{"name": "d", "adress": "h:1"}]},
            r"key device\[1\].adress is unknown; did you mean device\[1\].address\?",
        ),
        ({"id": "g", "device": DEVICES, "tls": "yes"}, r"tls must be a table, \[tls\], got 'yes'"),
        ({"id": "g", "device": DEVICES, "rounds": 3}, "key rounds is unknown"),
        ({"id": "g", "device": [*DEVICES, DEVICES[0]]}, "two members are called 'pi-1'"),
        ({"id": "g", "device": DEVICES, "server": {"name": "PI-1"}}, "two members are called"),
        (
            {"id": "g", "device": [*DEVICES, {**DEVICES[0], "name": "pi-3"}]},
            "two members have the address '10.0.0.11:50071'",
        ),
        ({"id": "g", "device": DEVICES, "edge": {"name": "PI-1"}}, "two members are called"),
        (
            {"id": "g", "device": DEVICES, "edge": {"name": "pi-1", "address": "10.0.0.2:50061"}},
            "edge.address is '10.0.0.2:50061', .* device 'pi-1' at '10.0.0.11:50071': leave",
        ),
        (
            {"id": "g", "device": DEVICES[:1], "edge": {"name": "pi-1"}},
            r"\[edge\] names 'pi-1', the only device",
        ),
        (
            {"id": "g", "device": [{"name": "d", "dials": True, "address": "h:1"}], "tls": {}},
            r"device\[1\] of d dials, so it has no address",
        ),
        (
            {"id": "g", "device": [{"name": "d", "dials": True}], "relay": "h:1"},
            r"device\[1\] of d dials, which needs \[tls\]",
        ),
        (
            {"id": "g", "device": [{"name": "d", "dials": True}], "tls": {}},
            r"device\[1\] of d dials, and nothing says where",
        ),
        ({"id": "g", "device": DEVICES, "edge": {"dials": True}}, "only a device dials"),
        ({"id": "g", "device": ["pi-1"]}, r"at least one \[\[device\]\] table"),
        ({"id": "g", "device": [DEVICES[0], 3]}, r"device\[2\] must be a table, .* got 3"),
        ({"id": 3, "device": DEVICES}, "id must be a string, got 3"),
    ],
)
def test_a_mistake_is_one_sentence_with_key_and_value(values, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_cluster(values, Path())


def test_an_edge_may_be_a_device_or_the_control_unit() -> None:
    on_device = parse_cluster({"id": "g", "device": DEVICES, "edge": {"name": "pi-1"}}, Path())
    assert on_device.edge is on_device.devices[0]
    assert not on_device.edge_is_control_unit
    here = parse_cluster({"id": "g", "device": DEVICES, "edge": {"name": "control-unit"}}, Path())
    assert here.edge_is_control_unit
    for cluster in (on_device, here):
        assert cluster.names == ("control-unit", "pi-1", "pi-2", "server")
        assert cluster.list_in_role(Role.EDGE) == ()


def test_devices_that_dial_are_reached_at_one_address_of_their_control_unit() -> None:
    devices = [*DEVICES, *({"name": name, "dials": True} for name in ("phone", "tablet"))]
    unit = {"name": "hub", "address": "10.0.0.10:50060"}
    values = {"id": "g", "control-unit": unit, "device": devices, "tls": {}}
    found = parse_cluster(values, Path())
    assert [d.name for d in found.diallers] == ["phone", "tablet"]
    assert {d.address for d in found.diallers} == {"10.0.0.10:50062"}
    elsewhere = parse_cluster({**values, "relay": "home.example:7000"}, Path())
    assert {d.address for d in elsewhere.diallers} == {"home.example:7000"}


@pytest.mark.parametrize(("text", "words"), [("id = ", "is not TOML"), (None, "cannot be read")])
def test_an_unreadable_file_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"cluster file .*c.toml {words}"):
        read_cluster(path)


def test_a_device_is_trusted_where_the_file_says_so() -> None:
    trusted = {**DEVICES[0], "trusted": True}
    cluster = parse_cluster({"id": "g", "device": [trusted, DEVICES[1]]}, Path())
    assert [device.trusted for device in profile_cluster(cluster, 1).devices] == [True, False]
    assert parse_cluster(tomllib.loads(format_cluster(cluster)), Path()) == cluster


def test_an_unknown_member_is_answered_with_those_there_are() -> None:
    cluster = parse_cluster({"id": "g", "device": DEVICES}, Path())
    with pytest.raises(ConfigError, match="no member 'pi-9': choose one of control-unit, pi-1"):
        cluster.member("pi-9")


def test_a_cluster_file_knows_the_codecs_that_there_are() -> None:
    for codec in CODECS:
        values = {"id": "g", "device": DEVICES, "links": {"codec": codec}}
        assert parse_cluster(values, Path()).links.codec == codec


@pytest.mark.parametrize("rank", [0, -1, 2.5, "four", True])
def test_a_rank_of_adapters_is_a_whole_number(rank: object) -> None:
    with pytest.raises(ConfigError, match=r"^lora-rank must be .* got .*"):
        parse_cluster({"id": "g", "device": DEVICES, "lora-rank": rank}, Path())
    config = parse_cluster({"id": "g", "device": DEVICES, "lora-rank": 4}, Path())
    assert profile_cluster(config, 1).lora_rank == 4
    assert profile_cluster(parse_cluster({"id": "g", "device": DEVICES}, Path()), 1).lora_rank == 0
