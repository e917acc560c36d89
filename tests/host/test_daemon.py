"""`collapipe device` as a process: what it imports, how it stops, whom it refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.host.daemon import HostSettings, serve
from collapipe_flwr.host.rosters import Rosters
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.client import HostClient
from tests.cluster.daemon_processes import ROOT, Daemon, running
from tests.host.chain_to_edge import request, session_key

IDLE_MOST_BYTES = 64 * 2**20


def test_a_device_that_waits_has_loaded_no_library_of_models_or_of_flower():
    script = (
        "import sys, threading, collapipe_flwr.host.daemon as daemon\n"
        "from collapipe_flwr.cli import app\n"
        "def stop(address):\n"
        "    print(*sorted({name.partition('.')[0] for name in sys.modules}))\n"
        "    raise SystemExit\n"
        "daemon.serve(daemon.HostSettings(listen='127.0.0.1:0', name='d'), passes_on=True, "
        "announce=stop)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    loaded = set(done.stdout.split())
    assert {"grpc", "collapipe_flwr"} <= loaded
    heavy = {"torch", "transformers", "flwr", "datasets", "cvxpy", "numpy", "scipy", "pandas"}
    assert not loaded & (heavy | {"google", "cryptography"})


def test_a_cache_that_cannot_be_made_is_refused_before_the_device_listens(tmp_path: Path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    settings = HostSettings(listen="127.0.0.1:0", name="d", cache_dir=folder)
    with pytest.raises(ConfigError, match=f'--cache-dir "{folder}" cannot be made'):
        serve(settings, passes_on=True, announce=pytest.fail)


def test_a_stop_ends_an_idle_device_in_good_order():
    with running(Daemon("device", "--grace-s", "200", cold=True)) as (daemon,):
        assert resident_bytes(daemon.process.pid) < IDLE_MOST_BYTES
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0


def test_a_stop_breaks_streams_off_after_their_grace():
    with (
        running(Daemon("device", "--grace-s", "0.5")) as (daemon,),
        HostClient(daemon.address) as client,
    ):
        client.open_session(request("c1", blocks=(0, 1)))
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
        with pytest.raises(LinkError, match="cannot be reached"):
            client.get_session(session_key()).report()


def test_a_host_that_cannot_end_says_what_keeps_it_and_ends():
    script = (
        "import signal, os, threading, collapipe_flwr.host.daemon as daemon\n"
        "daemon._LEAVE_S = 1.0\n"
        "def held_up():\n"
        "    threading.Event().wait()\n"
        "threading.Thread(target=held_up).start()\n"
        "daemon.serve(daemon.HostSettings(listen='127.0.0.1:0', name='d', grace_s=0.0), "
        "passes_on=True, announce=lambda _: os.kill(os.getpid(), signal.SIGTERM))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert done.returncode == 1
    assert "in held_up" in done.stderr


def test_a_device_that_is_removed_while_it_starts_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tls = sign_all(tmp_path, {"pi-1": ["127.0.0.1"]})["pi-1"]
    rosters = Rosters("pi-1", [], tls.ca, ["cu"])
    stop = threading.Event()

    @contextmanager
    def serve_metrics(*_: object) -> Iterator[None]:
        rosters.on_removed("pi-1 was removed from shed")  # the listener serves already
        yield

    def announce(address: str) -> None:
        assert address and stop.is_set()

    there = "collapipe_flwr.host.daemon"
    monkeypatch.setattr(f"{there}.configure_malloc", lambda: None)
    monkeypatch.setattr(f"{there}.stop_on_signals", lambda: nullcontext(stop))
    monkeypatch.setattr(f"{there}.serve_metrics", serve_metrics)
    # It would end the process of the tests.
    monkeypatch.setattr(f"{there}.faulthandler.dump_traceback_later", lambda *_, **__: None)
    settings = HostSettings(listen="127.0.0.1:0", name="pi-1", tls=tls, rosters=rosters)
    serve(settings, passes_on=True, announce=announce)


def test_only_members_of_the_cluster_may_call(tmp_path: Path):
    members = sign_all(tmp_path, {name: ["127.0.0.1"] for name in ("pi-1", "cu", "stranger")})
    outside = sign_all(tmp_path / "other", {"cu": ["127.0.0.1"]})
    device = Daemon("device", "--name", "pi-1", "--allow", "cu", tls=members["pi-1"])
    with running(device) as (daemon,):
        with HostClient(daemon.address, tls=members["cu"], deadline_s=200) as client:
            assert client.ask_health().sessions == 0
        with (
            HostClient(daemon.address, tls=members["stranger"]) as client,
            pytest.raises(LinkError, match=r"names stranger, .*no member here"),
        ):
            client.ask_health()
        with (
            HostClient(daemon.address, tls=outside["cu"], deadline_s=5) as client,
            pytest.raises(LinkError),
        ):
            client.ask_health()
        with HostClient(daemon.address, deadline_s=5) as client, pytest.raises(LinkError):
            client.ask_health()
        named = {"tls": members["cu"], "certificate_name": "pi-2", "deadline_s": 5.0}
        with HostClient(daemon.address, **named) as client, pytest.raises(LinkError):
            client.ask_health()


@pytest.mark.parametrize("listen", ["0.0.0.0:50071", "[::]:50071", "10.0.0.1:50071"])
def test_plain_text_beyond_loopback_must_be_asked_for(listen: str):
    with pytest.raises(ConfigError, match="--insecure"):
        HostSettings(listen=listen, name="pi-1")
    assert HostSettings(listen=listen, name="pi-1", insecure=True).tls is None


def test_a_name_that_no_cluster_has_is_refused_with_its_option(tmp_path: Path):
    file = tmp_path / "shed.toml"
    file.write_text('id = "shed"\n[[device]]\nname = "shed-1"\naddress = "127.0.0.1:50071"\n')
    done = CliRunner().invoke(app, ["device", "--cluster", str(file)])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("--name: cluster shed has no member 'device': choose one")


def test_half_of_the_tls_files_are_refused(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "collapipe_flwr.cli", "device", "--tls-ca", str(tmp_path / "ca")],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: --tls-cert is missing")


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS")
    )
