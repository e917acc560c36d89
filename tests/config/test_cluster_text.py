"""A cluster written as text reads as the same cluster."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from collapipe_flwr.config.cluster_file import (
    ClusterLinks,
    MemberConfig,
    TlsConfig,
    format_cluster,
    parse_cluster,
)
from collapipe_flwr.config.privacy import PrivacyConfig

DEVICES = (
    MemberConfig(name="pi-1", address="[::1]:50071", memory_mb=1500.5, fingerprint="0" * 64),
    MemberConfig(name="pi-2", address="10.0.0.12:50071", kind="jetson-nano", tx_power_w=0.1),
)
DIALS = MemberConfig(name="phone", address="10.0.0.10:50062", dials=True)


def test_what_is_written_is_read() -> None:
    plain = parse_cluster({"id": "g", "version": 1}, Path("/etc/collapipe"))
    full = replace(
        plain,
        version=7,
        control_unit=MemberConfig(name="cu-g", address="10.0.0.10:50060"),
        devices=DEVICES,
        edge=MemberConfig(name="edge", address="10.0.0.2:50061"),
        server=MemberConfig(name="boss"),
        links=ClusterLinks(rate_mbit_per_s=40.0, codec="int8"),
        privacy=PrivacyConfig(labels="home", trusted_blocks=2),
        tls=TlsConfig(ca="keys/ca.pem"),
        measured=Path("/etc/collapipe/g.json"),
        lora_rank=4,
    )
    dialled = replace(full, devices=(*DEVICES, DIALS))
    as_edge = replace(dialled, edge=DIALS)
    others = (as_edge, replace(full, tls=None), replace(plain, tls=TlsConfig()))
    for cluster in (plain, full, dialled, *others):
        text = format_cluster(cluster)
        assert parse_cluster(tomllib.loads(text), cluster.folder) == cluster
