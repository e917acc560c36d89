"""Planned power reaches `iw` in its unit, and a radio that cannot never stops training."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.host.daemon import HostSettings, set_power, to_millibel_milliwatts
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.config import NextHop
from collapipe_flwr.transport.client import Dialer, HostClient
from tests.host.chain_to_edge import request, session_key
from tests.host.test_devices import build
from tests.pipeline.chains import make_parts


@pytest.mark.parametrize(("watts", "expected"), [(0.1, 2000), (1e-3, 0), (0.2, 2301), (0.0, 0)])
def test_watts_become_hundredths_of_dbm(watts: float, expected: int) -> None:
    assert to_millibel_milliwatts(watts) == expected


def test_iw_is_called_with_the_interface_and_its_refusal_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "iw"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho not permitted >&2\nexit 1\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    set_power("wlan0", 0.1)
    assert (tmp_path / "calls").read_text() == "dev wlan0 set txpower fixed 2000\n"
    assert "planned power not applied" in caplog.text and "not permitted" in caplog.text


def test_a_system_without_iw_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    set_power("wlan0", 0.1)
    assert "planned power not applied" in caplog.text


@pytest.mark.parametrize(("interface", "calls"), [("", 0), ("wlan0", 1)])
def test_a_daemon_leaves_its_radio_alone_unless_an_interface_is_named(
    interface: str, calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, heard = tmp_path / "iw", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$@" >> {heard}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    set_power(interface, 0.1)
    lines = heard.read_text().splitlines() if heard.exists() else []
    assert lines == ["dev wlan0 set txpower fixed 2000"] * calls


def test_a_strange_interface_is_refused() -> None:
    with pytest.raises(ConfigError, match="--radio-interface"):
        HostSettings(listen="127.0.0.1:0", name="d", radio_interface="wlan0; reboot")


def test_a_device_applies_the_power_of_its_session_when_its_stream_begins() -> None:
    told, parts = list[float](), make_parts((2,))
    service = HostService(build, connect=Dialer(name="device 1"), set_power=told.append)
    hop = NextHop(address="127.0.0.1:1", key=session_key())
    with HostServer("127.0.0.1:0", service) as server, HostClient(server.address) as client:
        client.open_session(request(blocks=(0, 2), next_hops=(hop,), tx_power_w=0.05))
        client.get_session(session_key()).push_weights(parts[1].state_dict())
        assert told == []
        with suppress(LinkError):  # the next hop is not there, which may be heard at once
            client.get_session(session_key()).stream().close()
    assert told == [0.05]
