"""Which daemons answer: those that have loaded nothing yet do, those that are stopping do not."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import parse_cluster, read_cluster
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.transport.client import HostClient
from tests.cluster.daemon_processes import Daemon, running, where_torch_never_loads
from tests.host.chain_to_edge import request, service, session_key

NOWHERE = HostedEdge(address="")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that does much else."""
    monkeypatch.setattr("collapipe_flwr.cluster.remote.PROBE_S", 30.0)


def fleet(*addresses: str) -> RemoteFleet:
    """Of boards 0, 1, ..."""
    boards = [{"name": str(index), "address": there} for index, there in enumerate(addresses)]
    cluster = parse_cluster({"id": "shed", "device": boards}, Path())
    return RemoteFleet(cluster=cluster, edges={"": NOWHERE})


def test_a_daemon_that_has_not_loaded_torch_is_there(tmp_path: Path) -> None:
    with running(Daemon("device", first=where_torch_never_loads(tmp_path))) as (daemon,):
        boards = fleet(daemon.address, "127.0.0.1:1")
        assert boards.find_missing(["shed/0", "shed/1"]) == {"shed/1"}
        with HostClient(daemon.address) as client:
            assert not client.ask_status().awake


def test_where_none_answers_all_are_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe_flwr.cluster.remote.PROBE_S", 0.5)
    monkeypatch.setattr("collapipe_flwr.cluster.remote.PATIENT_PROBE_S", 60.0)
    with running(Daemon("device")) as (daemon,):
        boards = fleet(daemon.address, "127.0.0.1:1")
        both = ["shed/0", "shed/1"]
        daemon.process.send_signal(signal.SIGSTOP)

        def go_on(message: str, *_: object) -> None:
            if "asking all again" in message:
                daemon.process.send_signal(signal.SIGCONT)

        monkeypatch.setattr("collapipe_flwr.cluster.remote._log.warning", go_on)
        assert boards.find_missing(both) == {"shed/1"}
        daemon.process.send_signal(signal.SIGSTOP)
        with HostServer("127.0.0.1:0", service()) as other:
            assert fleet(daemon.address, other.address).find_missing(both) == {
                "shed/0"
            }  # not again


def test_a_daemon_that_is_stopping_is_lost() -> None:
    with HostServer("127.0.0.1:0", service()) as server, HostClient(server.address) as client:
        boards = fleet(server.address)
        client.open_session(request())
        assert boards.find_missing(["shed/0"]) == frozenset()
        drain = threading.Thread(target=server.drain, args=(60.0,))
        drain.start()
        while drain.is_alive() and not boards.find_missing(["shed/0"]):
            pass
        assert drain.is_alive()
        client.get_session(session_key()).close()
        drain.join(60)


def test_a_cluster_file_that_is_being_edited_costs_no_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "shed.toml"
    with HostServer("127.0.0.1:0", service()) as server:
        device = f'[[device]]\nname = "0"\naddress = "{server.address}"\n'
        file.write_text(f'id = "shed"\nversion = 1\n{device}')
        boards = RemoteFleet(cluster=read_cluster(file), edges={"": NOWHERE})
        file.write_text("[[device")
        assert boards.find_missing(["shed/0"]) == frozenset()
    assert f"cluster file {file} is not TOML" in caplog.text
