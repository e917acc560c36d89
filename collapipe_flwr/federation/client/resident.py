"""The control unit as a resident process, which answers the messages of relays.

It loads once per run what a ClientApp loads per message: libraries, data, tokenizer, the model's
skeleton. It holds one run's code, imported from the folder that Flower installed it in. It restarts
for another run or other files, and when a relay disconnects before it was answered, which ends the
round with everything that it had open.

To restart, it executes itself and keeps only its listening socket, passed by systemd's protocol
(``LISTEN_FDS``), so that connections made meanwhile wait instead of failing.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from collapipe_flwr.core.errors import CollaPipeError, LinkError
from collapipe_flwr.core.json_log import add_log_fields
from collapipe_flwr.core.processes import stop_on_signals
from collapipe_flwr.federation.client import STATE_KEY, local_socket
from collapipe_flwr.federation.client.relay import AGAIN, ALIVE, READY, REFUSED, VERSION, AppCode
from collapipe_flwr.host.allocator import configure_malloc, trim_heap
from collapipe_flwr.host.metrics import serve_metrics

log = logging.getLogger("flwr.collapipe")
_OURS = "collapipe."  # how the keys of our records begin
ANSWERED, RAISED, ABANDONED = "answered", "raised", "abandoned"
_LOOK_S = 0.1
_ALIVE_S = 5.0
_BODY_S = 60.0  # until a silent relay counts as lost
_CODE = "COLLAPIPE_CONTROL_UNIT_CODE"  # what the process was executed for, as JSON
_PATH = "COLLAPIPE_CONTROL_UNIT_PATH"  # PYTHONPATH at its first start
_FIRST_FD = 3


class ResidentMetrics:
    """A prometheus_client collector; written by one thread, read by any."""

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter({ANSWERED: 0, RAISED: 0, ABANDONED: 0})
        self._busy, self._spent_s, self._round = False, 0.0, 0

    @contextmanager
    def time_work(self, about: Mapping[str, Any]) -> Iterator[None]:
        """Count the body as time spent on a message."""
        began_s = time.monotonic()
        self._busy, self._round = True, int(about.get("round", self._round))
        try:
            yield
        finally:
            self._busy = False
            self._spent_s += time.monotonic() - began_s

    def count_message(self, how: str) -> None:
        self._ended[how] += 1

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        name = "collapipe_control_unit"
        yield GaugeMetricFamily(f"{name}_busy", "Whether a message is worked on.", self._busy)
        yield GaugeMetricFamily(f"{name}_round", "Newest round that was asked for.", self._round)
        yield CounterMetricFamily(f"{name}_seconds", "Seconds of work on messages.", self._spent_s)
        ended = CounterMetricFamily(f"{name}_messages", "Messages that ended.", labels=("how",))
        for how, count in self._ended.items():
            ended.add_metric((how,), count)
        yield ended


def describe_message(message: Message) -> dict[str, Any]:
    """Return run, round and cluster of an order; of other messages, the type alone."""
    about: dict[str, Any] = {"type": message.metadata.message_type}
    configs = message.content.config_records.values() if message.has_content() else ()
    if not any(key.startswith(_OURS) for config in configs for key in config):
        return about
    from collapipe_flwr.federation.records import (  # loads torch
        flower_round,
        read_assignment,
        run_id_of,
    )

    with suppress(CollaPipeError):  # the app reports it
        about["run"] = run_id_of(message.content)
        about["round"] = flower_round(message.content)
    with suppress(CollaPipeError):  # that there is none, where whole models are evaluated
        asked = read_assignment(message.content)
        about |= {"round": asked.server_round, "cluster": asked.cluster_id}
    return about


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSettings:
    """The socket's path; ``state_dir`` is for nodes and runs that name none.

    After a stop, the current message gets ``grace_s`` to be answered. Prometheus metrics are served
    at the address ``metrics``, unless it is empty.
    """

    path: Path
    state_dir: Path | None = None
    grace_s: float = 10.0
    metrics: str = ""


def serve(settings: ResidentSettings, announce: Callable[[str], None]) -> None:
    """Answer relays until SIGTERM or SIGINT; raises ConfigError where it cannot listen."""
    configure_malloc()
    with stop_on_signals() as stop:
        listener = take_listener() or local_socket.listen(settings.path)
        announce(str(settings.path))
        unit = ControlUnit(listener, settings, stop)
        with serve_metrics(settings.metrics, unit.metrics):
            unit.serve()
        settings.path.unlink(missing_ok=True)
        os._exit(0)  # ends a message that was not answered in time


def _call_app(
    app: ClientApp, message: Message, context: Context, about: Mapping[str, Any]
) -> tuple[dict[str, Any], RecordDict]:
    """Return head and content of the app's reply; ``about`` is for the logs."""
    with add_log_fields(**about):
        began_s = time.monotonic()
        try:
            reply = app(message, context)
            log.info("answered after %.1f s", time.monotonic() - began_s)
        except Exception as error:  # as Flower does
            log.error("the app raised an exception", exc_info=error)
            return {"raised": [type(error).__name__, str(error)]}, RecordDict()
    if reply.has_error():
        failure = {"code": reply.error.code, "reason": reply.error.reason}
        return {"error": failure}, RecordDict()
    return {}, reply.content


class ControlUnit:
    """Answers relays one after the other, with the code that this process was started for."""

    def __init__(
        self, listener: socket.socket, settings: ResidentSettings, stop: threading.Event
    ) -> None:
        self._listener, self._settings, self._stop = listener, settings, stop
        self._worker = ThreadPoolExecutor(1, "message")
        self.metrics = ResidentMetrics()
        self._code = read_code()
        self._app: ClientApp | None = None
        self._why = ""  # the app is missing

    def serve(self) -> None:
        """Answer relays until a stop is requested."""
        if self._code is not None:
            self._load(self._code)
        while not self._stop.is_set():
            if select.select([self._listener], [], [], _LOOK_S)[0]:
                peer, _ = self._listener.accept()
                with peer:
                    self._handle(peer)
                gc.collect()
                trim_heap()

    def _load(self, code: AppCode) -> None:
        try:
            self._app = code.load()
        except Exception as error:  # any error at import; every relay gets it
            log.error("%s cannot be imported", code.app, exc_info=error)
            self._why = f"{code.app} cannot be imported: {error}"

    def _handle(self, peer: socket.socket) -> None:
        if not local_socket.is_own(peer):
            log.warning("a process of another user was refused")
            return
        peer.settimeout(_BODY_S)
        try:
            with peer.makefile("rb") as file:
                hello, _ = local_socket.read_parcel(file)
                verdict, why = self._judge(hello)
                local_socket.write_parcel(peer, {"verdict": verdict, "why": why})
                order = local_socket.read_parcel(file) if verdict == READY else None
        except LinkError as error:
            log.info("a relay disconnected: %s", error)
            return
        if verdict == AGAIN:
            restart(self._listener, AppCode.of_json(hello))
        if order is not None:
            self._answer(peer, *order)

    def _judge(self, hello: Mapping[str, Any]) -> tuple[str, str]:
        if hello.get("version") != VERSION:
            return REFUSED, "it was installed from another version than the app"
        if AppCode.of_json(hello) != self._code:
            return AGAIN, ""
        return (REFUSED, self._why) if self._app is None else (READY, "")

    def _answer(
        self, peer: socket.socket, head: Mapping[str, Any], contents: Sequence[RecordDict]
    ) -> None:
        """Have the app work in a thread, so that its relay can be watched."""
        assert self._app is not None and self._code is not None
        message, context = local_socket.decode_order(head, *contents)
        self._lend_state_dir(context)
        TaskIdentity.task_id = message.metadata.dst_task_id or 0
        TaskIdentity.run_id, TaskIdentity.node_id = context.run_id, context.node_id
        about = describe_message(message)
        with self.metrics.time_work(about), add_log_fields(**about):
            work = self._worker.submit(_call_app, self._app, message, context, about)
            try:
                if self._wait(peer, work):
                    reply, content = work.result()
                    local_socket.write_parcel(peer, reply, content, context.state)
                    self.metrics.count_message(RAISED if "raised" in reply else ANSWERED)
            except LinkError as error:
                log.warning("a message is abandoned: %s", error)
                self.metrics.count_message(ABANDONED)
                if not self._stop.is_set():  # else SuperNode and control unit are stopped together
                    restart(self._listener, self._code)

    def _wait(self, peer: socket.socket, work: Future[Any]) -> bool:
        """Wait for the reply; False after a stop's grace. Raises LinkError without a relay."""
        told_s, stopped_s = time.monotonic(), None
        while not wait([work], _LOOK_S).done:
            now_s = time.monotonic()
            if select.select([peer], [], [], 0)[0]:
                raise LinkError("its relay disconnected")
            if now_s - told_s > _ALIVE_S:
                local_socket.write_parcel(peer, {ALIVE: True})
                told_s = now_s
            if self._stop.is_set():
                stopped_s = stopped_s or now_s
                if now_s - stopped_s > self._settings.grace_s:
                    return False
        return True

    def _lend_state_dir(self, context: Context) -> None:
        """Use this process's state folder where neither node nor run name one."""
        lent = self._settings.state_dir
        if lent is not None and not context.run_config.get(f"train.{STATE_KEY}"):
            context.node_config = {STATE_KEY: str(lent), **context.node_config}


def restart(listener: socket.socket, code: AppCode) -> NoReturn:
    """Execute this command again, with the folder of ``code`` first on the path."""
    path = os.environ.get(_PATH, os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "LISTEN_FDS": "1",
        "LISTEN_PID": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(filter(None, (code.folder, path))),
        "PYTHONSAFEPATH": "1",  # the working directory may hold files of the same name
        _PATH: path,
        _CODE: json.dumps(asdict(code)),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(listener.fileno(), _FIRST_FD)
    os.set_inheritable(_FIRST_FD, True)
    os.closerange(_FIRST_FD + 1, os.sysconf("SC_OPEN_MAX"))
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def take_listener() -> socket.socket | None:
    """Take the listening socket passed by systemd, or by this process before it restarted."""
    given = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    if given != (str(os.getpid()), "1"):
        return None
    os.set_inheritable(_FIRST_FD, False)
    return socket.socket(fileno=_FIRST_FD)


def read_code() -> AppCode | None:
    """Read the code that this process was executed for; None on its first start."""
    code = os.environ.pop(_CODE, "")
    return AppCode.of_json(json.loads(code)) if code else None
