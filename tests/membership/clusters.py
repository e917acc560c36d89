"""A control unit's folder, its joining service on loopback, and boards that join by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from collapipe_flwr.cluster.profile import Measured
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, Role
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.host.server import Listener
from collapipe_flwr.membership.admission import JoiningService
from collapipe_flwr.membership.newcomer import Membership, Newcomer, join
from collapipe_flwr.membership.registry import Registry, issue_token
from collapipe_flwr.membership.tokens import JoinToken
from tests.ports import free_port

ID, UNIT = "shed", "cu-shed"


def new_registry(
    folder: Path, edge_address: str = "127.0.0.1:1", elsewhere: frozenset[Role] = frozenset()
) -> Registry:
    registry = Registry(folder)
    with registry.lock():
        unit = MemberConfig(name=UNIT, address="127.0.0.1:50060")
        registry.create(ID, unit, edge_address, elsewhere)
    return registry


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return new_registry(tmp_path / "cu", f"127.0.0.1:{free_port()}")


@pytest.fixture
def joining(registry: Registry) -> Iterator[JoiningService]:
    """Lets boards join the ``registry`` of the test."""
    with JoiningService(registry, "127.0.0.1:0") as listening:
        yield listening


@pytest.fixture
def pair(tmp_path: Path, registry: Registry, joining: JoiningService) -> list[Membership]:
    """The memberships of two boards that have joined the ``registry``."""
    return join_pair(tmp_path, registry, joining)


def print_token(
    registry: Registry, *, members: int = 1, minutes: float = 60.0, role: Role = Role.DEVICE
) -> JoinToken:
    with registry.lock():
        return issue_token(registry, registry.cluster(), role, members=members, minutes=minutes)


def board(folder: Path, name: str, port: int = 1000) -> Newcomer:
    return Newcomer(folder=folder / name, name=name, address=f"127.0.0.1:{port}")


def measured(name: str) -> Measured:
    return Measured(name=name, speed_flop_per_s=7e9, overhead_s=0.01, memory_bytes=10**9)


def joined(service: JoiningService, token: JoinToken, newcomer: Newcomer) -> Membership:
    return join(token, newcomer, measured, address=service.address)


def join_pair(folder: Path, registry: Registry, service: JoiningService) -> list[Membership]:
    """Let the boards pi-1 and pi-2 join by one token."""
    token = print_token(registry, members=2)
    return [joined(service, token, board(folder, n, free_port())) for n in ("pi-1", "pi-2")]


def rosters_of(member: Membership) -> Rosters:
    files = member.cluster.tls_files(member.name)
    assert files is not None and files.ca is not None
    return Rosters(member.name, [member.cluster], files.ca)


@contextmanager
def daemon(member: Membership, rosters: Rosters | None = None) -> Iterator[Listener]:
    """What `collapipe device` listens with, without parts."""

    def no_servicer():
        raise AssertionError("nobody asks for a part")

    with Listener(
        member.cluster.member(member.name).address,
        no_servicer,
        tls=member.cluster.tls_files(member.name),
        rosters=rosters or rosters_of(member),
    ) as listener:
        yield listener


def names(config: ClusterConfig) -> set[str]:
    return {device.name for device in config.devices}
