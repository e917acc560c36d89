"""`collapipe control-unit` as a process of its own, and the relays that hand it messages."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from collapipe_flwr import Relay
from collapipe_flwr.core.errors import (
    Blame,
    ConfigError,
    DataError,
    LinkError,
    MemberFailed,
    MemberSilent,
    RunError,
)
from collapipe_flwr.federation.client.local_socket import (
    listen,
    open_connection,
    read_parcel,
    write_parcel,
)
from collapipe_flwr.federation.client.relay import REFUSED, _exchange, _rebuild_error
from collapipe_flwr.federation.client.resident import describe_message
from collapipe_flwr.federation.records import TaskAssignment, write_assignment
from tests.forked import program
from tests.host.scraping import listening_ports, scrape

ROOT = Path(__file__).parents[3]
WAIT_S = 120.0
APP = """
import os, socket
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from collapipe_flwr.core.errors import DataError

VERSION = 1
app = ClientApp()
calls = 0

@app.train()
def train(message, context):
    global calls
    calls += 1
    asked = message.content["asked"]
    if asked["do"] == "raise":
        raise DataError("no rows")
    if asked["do"] == "break":
        raise ZeroDivisionError("by nothing")
    if asked["do"] == "hold":
        held = socket.create_connection(("127.0.0.1", asked["port"]))
        held.recv(1)
    context.state["seen"] = ConfigRecord({"calls": calls})
    told = ConfigRecord({"pid": os.getpid(), "calls": calls, "version": VERSION})
    state_dir = str(context.node_config.get("state-dir", ""))
    content = {**message.content, "told": told, "node": ConfigRecord({"state-dir": state_dir})}
    return Message(RecordDict(content), reply_to=message)
"""
ARRAYS = {
    "half": Array("float16", (2, 3), "collapipe.torch", b"\1\2\3\4\5\6\7\10\11\12\13\14"),
    "none": Array("float32", (0,), "numpy.ndarray", b""),
}
METRICS = {"loss": 0.1, "rows": 2**60, "each": [1.5, float("inf")]}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with made_project(tmp_path, monkeypatch) as package:
        yield package


@contextmanager
def made_project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose app imports flwr alone, where Python finds it."""
    forget_probes()
    package = folder / "fab" / "probe_app"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "work.py").write_text(APP)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    yield package
    forget_probes()


def forget_probes() -> None:
    """The next project has an app of the same name."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "probe_app"]:
        del sys.modules[name]


@contextmanager
def control_unit(folder: Path, *options: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    path = folder / "private" / "socket"
    command = [sys.executable, "-m", "collapipe_flwr.cli", "control-unit", "--socket", str(path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=folder
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"control unit at {path}\n"
            yield path, process
        finally:
            process.kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A control unit with its folder: two imports of all that it needs, one for the app's code."""

    folder: Path
    path: Path
    process: subprocess.Popen[str]


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unit]:
    """For tests that leave it as it was, but for its counters."""
    folder = tmp_path_factory.mktemp("unit")
    options = ("--state-dir", str(folder / "kept"), "--metrics", "0", "--log-format", "json")
    with (
        pytest.MonkeyPatch.context() as patch,
        made_project(folder, patch),
        control_unit(folder, *options) as (path, process),
    ):
        yield Unit(folder=folder, path=path, process=process)


def ask(
    path: Path | str, do: str = "answer", run: int = 1, port: int = 0
) -> tuple[Message, Context]:
    config = ConfigRecord({"do": do, "port": port, "raw": [b"\0\xff"], "flags": [True, False]})
    content = {
        "asked": config,
        "arrays": ArrayRecord(dict(ARRAYS)),
        "metrics": MetricRecord(dict(METRICS)),
    }
    context = Context(run, 7, {"control-unit": str(path)}, RecordDict(), {"seed": 3})
    message = Message(RecordDict(content), 7, "train")
    return Relay("probe_app.work:app")(message, context), context


def wait_for_its_turn(path: Path) -> None:
    """Relays are served one after the other: a further one is greeted after those before it."""
    relay = open_connection(path)
    assert relay is not None
    with relay, relay.makefile("rb") as file:
        relay.settimeout(WAIT_S)
        write_parcel(relay, {"version": "of another app"})
        assert read_parcel(file)[0]["verdict"] == REFUSED


def told(path: Path | str, run: int = 1) -> dict[str, object]:
    return dict(ask(path, run=run)[0].content["told"])


def test_a_message_is_answered_there_as_it_would_be_here(unit: Unit) -> None:
    here, context = ask("")
    assert here.content["told"]["pid"] == os.getpid()
    there, lent = ask(unit.path)
    assert there.content["told"]["pid"] == unit.process.pid
    for name in ("asked", "arrays", "metrics"):
        assert there.content[name] == here.content[name]
    assert set(lent.state) == set(context.state)
    assert there.metadata.dst_node_id == here.metadata.dst_node_id
    assert told(unit.path)["calls"] == there.content["told"]["calls"] + 1, "it stayed"


def test_it_runs_the_files_of_the_run_and_never_older_ones(project: Path, tmp_path: Path) -> None:
    with control_unit(tmp_path) as (path, process):
        first = told(path)
        (project / "work.py").write_text(APP.replace("VERSION = 1", "VERSION = 2  # since"))
        assert told(path) == {**first, "version": 2}
        assert told(path, run=2) == {**first, "version": 2}, "another run begins anew"
        assert told(path, run=2)["calls"] == 2
        assert process.poll() is None


def test_errors_there_are_raised_here(unit: Unit) -> None:
    before = told(unit.path)["calls"]
    with pytest.raises(DataError, match=r"^no rows$"):
        ask(unit.path, "raise")
    with pytest.raises(RunError, match=r"^ZeroDivisionError: by nothing$"):
        ask(unit.path, "break")
    assert told(unit.path)["calls"] == before + 3


@pytest.mark.parametrize("kind", [MemberFailed, MemberSilent])
def test_the_failure_of_a_member_there_is_a_link_error_here(kind: type[MemberFailed]) -> None:
    there = kind("shed/d1", "no memory left", Blame.RAISED)
    here = _rebuild_error(type(there).__name__, str(there))
    assert type(here) is LinkError and str(here) == "shed/d1 failed: no memory left"


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("answer", [{"raised": ["DataError", "no rows"]}, None], ids=str)
def test_a_round_that_fails_there_leaves_the_state_here_unchanged(
    answer: dict[str, list[str]] | None,
) -> None:
    state = RecordDict({"kept": ArrayRecord(dict(ARRAYS))})
    context = Context(1, 7, {}, state, {})
    here, there = socket.socketpair()

    def fail() -> None:
        with there, there.makefile("rb") as file:
            read_parcel(file)
            if answer:
                write_parcel(there, answer)

    with here:
        here.settimeout(WAIT_S)
        failing = threading.Thread(target=fail)
        failing.start()
        with pytest.raises(DataError if answer else LinkError):
            _exchange(here, Message(RecordDict(), 7, "train"), context)
        failing.join(WAIT_S)
    assert context.state["kept"] == ArrayRecord(dict(ARRAYS))


def test_an_app_that_it_cannot_import_runs_here(
    project: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (project / "work.py").write_text(f"import os\nassert os.getpid() == {os.getpid()}\n{APP}")
    logging.getLogger("flwr").propagate = True
    with control_unit(tmp_path) as (path, _):
        assert told(path)["pid"] == os.getpid()
    assert "probe_app.work:app cannot be imported" in caplog.text


HOLD = """
import sys; sys.path.insert(0, sys.argv[1])
from flwr.supercore.task_identity import TaskIdentity as T
T.task_id = T.run_id = T.node_id = 1
from tests.federation.client.test_resident import ask
ask(sys.argv[2], 'hold', 1, int(sys.argv[3]))
"""


@contextmanager
def abandoned(project: Path, path: Path, meanwhile: Callable[[], None]) -> Iterator[socket.socket]:
    """The connection of a round to a device, after the round's relay was killed."""
    with socket.create_server(("127.0.0.1", 0)) as device:
        device.settimeout(WAIT_S)
        told = (str(project.parent), str(path), str(device.getsockname()[1]))
        with program(HOLD, *told) as relay:
            held, _ = device.accept()
            meanwhile()
            relay.kill()
    with held:
        held.settimeout(WAIT_S)
        yield held


def test_a_relay_that_leaves_ends_its_round_and_all_that_it_had_open(
    project: Path, tmp_path: Path
) -> None:
    with control_unit(tmp_path) as (path, process):
        with abandoned(project, path, lambda: None) as held:
            assert held.recv(1) == b"", "the connection to a device ended with the round"
        assert told(path) == {"pid": process.pid, "calls": 1, "version": 1}


def test_a_stop_of_both_sides_ends_the_control_unit(project: Path, tmp_path: Path) -> None:
    with (
        control_unit(tmp_path, "--grace-s", "1000") as (path, process),
        abandoned(project, path, process.terminate) as held,
    ):
        assert process.wait(WAIT_S) == 0
        assert held.recv(1) == b""


@pytest.mark.usefixtures("project")
def test_a_control_unit_that_dies_fails_the_message_and_the_next_is_answered_by_another(
    tmp_path: Path,
) -> None:
    with (
        control_unit(tmp_path) as (path, process),
        socket.create_server(("127.0.0.1", 0)) as device,
    ):
        port = device.getsockname()[1]

        def kill_at_work() -> None:
            with device.accept()[0]:
                process.send_signal(signal.SIGKILL)

        killer = threading.Thread(target=kill_at_work)
        killer.start()
        with pytest.raises(LinkError, match="the control unit was lost while it worked on this"):
            ask(path, "hold", port=port)
        killer.join(WAIT_S)
        process.wait(WAIT_S)
        assert told(path)["pid"] == os.getpid(), "without one, it is answered here"
        with control_unit(tmp_path) as (_, next_one):
            assert told(path)["pid"] == next_one.pid


def test_only_its_user_can_reach_it_and_a_stop_leaves_nothing(tmp_path: Path) -> None:
    with control_unit(tmp_path) as (path, process):
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ConfigError, match="another control unit listens"):
            listen(path)
        process.terminate()
        assert process.wait(WAIT_S) == 0
        assert not path.exists()
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="must be this user's alone"):
        listen(path)


@pytest.mark.usefixtures("project")
def test_a_stop_gives_a_message_its_grace_and_no_more(tmp_path: Path) -> None:
    with (
        control_unit(tmp_path, "--grace-s", "0.5") as (path, process),
        socket.create_server(("127.0.0.1", 0)) as device,
    ):

        def stop_at_work() -> None:
            with device.accept()[0]:
                start_s = time.monotonic()
                process.terminate()
                process.wait(WAIT_S)
                waited_s.append(time.monotonic() - start_s)

        waited_s: list[float] = []
        stopper = threading.Thread(target=stop_at_work)
        stopper.start()
        with pytest.raises(LinkError, match="was lost"):
            ask(path, "hold", port=device.getsockname()[1])
        stopper.join(WAIT_S)
        assert process.returncode == 0
        assert waited_s[0] >= 0.5


def test_what_a_run_keeps_lies_in_its_folder_unless_the_node_names_one(unit: Unit) -> None:
    assert ask(unit.path)[0].content["node"]["state-dir"] == str(unit.folder / "kept")
    assert ask("")[0].content["node"]["state-dir"] == ""


def test_it_tells_and_logs_what_it_answers(unit: Unit) -> None:
    pytest.importorskip("prometheus_client")
    told(unit.path)  # its code is loaded in any case
    wait_for_its_turn(unit.path)
    (port,) = listening_ports(unit.process.pid)
    before, log = scrape(f"127.0.0.1:{port}"), unit.folder / "log"
    known = len(log.read_text().splitlines())
    told(unit.path)
    with pytest.raises(DataError):
        ask(unit.path, "raise")
    wait_for_its_turn(unit.path)  # it counts a message after its relay has the answer
    found = scrape(f"127.0.0.1:{port}")
    for how in ("answered", "raised"):
        key = ("collapipe_control_unit_messages_total", how)
        assert found[key] == before.get(key, 0) + 1
    assert found["collapipe_control_unit_busy",] == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()[known:]]
    about = [(line["level"], line["type"], line["device"]) for line in lines]
    assert about == [(level, "train", "control-unit") for level in ("info", "error")]
    assert "DataError: no rows" in lines[1]["error"]


@pytest.mark.usefixtures("project")
def test_a_log_says_which_round_of_which_cluster_an_order_is_about() -> None:
    order = write_assignment(
        RecordDict({"config": ConfigRecord()}), TaskAssignment(server_round=4, cluster_id="attic")
    )
    about = describe_message(Message(order, 7, "train"))
    assert about == {"type": "train", "round": 4, "run": "", "cluster": "attic"}


def test_the_relay_of_our_own_app_imports_flwr_alone() -> None:
    heavy = {"torch", "transformers", "datasets", "safetensors"}
    script = f"import sys, client_app.app; print(sorted(sys.modules.keys() & {heavy!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"
