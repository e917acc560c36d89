"""Members reach each other themselves, whatever proxy the environment names for the web."""

from __future__ import annotations

import pytest

from collapipe_flwr.host.server import Listener
from collapipe_flwr.transport.client import HostClient
from tests.ports import free_port


@pytest.mark.parametrize("name", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_no_link_of_members_goes_through_a_proxy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for others in ("no_proxy", "no_grpc_proxy", "http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.delenv(others, raising=False)
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")  # where nobody listens
    with Listener("127.0.0.1:0", None) as host, HostClient(host.address, deadline_s=20) as client:
        client.echo()
