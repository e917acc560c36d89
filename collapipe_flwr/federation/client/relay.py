"""A ClientApp that forwards its messages to the resident control unit beside it.

    app = Relay("my_app.client_app:app")

Flower starts a process per message. This one imports flwr alone: the app itself is imported by the
control unit, once per run. If no control unit listens, the app is imported and called here.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from collapipe_flwr.core import errors
from collapipe_flwr.core.errors import (
    CollaPipeError,
    ConfigError,
    LinkError,
    LinkTimeout,
    MemberFailed,
    RunError,
)
from collapipe_flwr.federation.client import local_socket

log = logging.getLogger("flwr.collapipe")
READY, AGAIN, REFUSED = "ready", "again", "refused"  # a control unit's verdicts on `AppCode`
ALIVE = "alive"  # sent periodically while it works
VERSION = 1
LOAD_S = 300.0  # for a board to import an app
SILENCE_S = 60.0  # of a control unit at work, until it counts as lost
_MOST_STARTS = 4  # of a control unit, until it has the code of this run


@dataclass(frozen=True, slots=True, kw_only=True)
class AppCode:
    """The app ``module:attribute``, imported from ``folder`` for a run.

    ``digest`` covers all Python files there: in a deployment, those of the FAB.
    """

    app: str
    folder: str
    digest: str
    run_id: int

    @staticmethod
    def here(app: str, run_id: int) -> AppCode:
        """Describe the code that this process would import; raises ConfigError without a module."""
        folder = _folder(app)
        return AppCode(app=app, folder=str(folder), digest=_digest(folder), run_id=run_id)

    @staticmethod
    def of_json(fields: Mapping[str, Any]) -> AppCode:
        return AppCode(**{name: fields[name] for name in AppCode.__slots__})

    def load(self) -> Any:
        """Import the app; raises RunError if it came from other files than these."""
        found = load_app(self.app)
        if AppCode.here(self.app, self.run_id) != self:
            raise RunError(f"{self.app} is not as in {self.folder}, but from {_folder(self.app)}")
        return found


def load_app(app: str) -> Any:
    """Import what ``module:attribute`` names; raises ConfigError if it names nothing."""
    module, _, name = app.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ConfigError(f"{app!r} must name an app as 'module:attribute'") from error


def _folder(app: str) -> Path:
    """Find the folder that holds the package of the app."""
    package = app.partition(":")[0].partition(".")[0]
    found = find_spec(package)
    places = [] if found is None else [*(found.submodule_search_locations or ()), found.origin]
    if not places or places[0] is None:
        raise ConfigError(f"{app!r}: there is no module {package}")
    return Path(places[0]).resolve().parent


def _digest(folder: Path) -> str:
    digest = sha256()
    for path in sorted(_list_sources(folder)):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _list_sources(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        yield from (Path(place, name) for name in files if name.endswith(".py"))


class Relay(ClientApp):
    """The app ``module:attribute``, called in the control unit if there is one, else here.

    A message is answered by exactly the files that Flower installed for its run: the control unit
    imports those, and restarts for another run or other files. Its errors are raised here.
    """

    def __init__(self, app: str) -> None:
        super().__init__()
        self._app = app

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; raises LinkError if the control unit is lost."""
        path = local_socket.path_for(context.node_config)
        peer = None if path is None else _connect(path, self._app, context.run_id)
        if peer is None:
            app: ClientApp = load_app(self._app)
            return app(message, context)
        with peer:
            return _exchange(peer, message, context)


def _connect(path: Path, app: str, run_id: int) -> socket.socket | None:
    """Connect to a control unit that runs this code; None if there is none."""
    code = None  # its files are read only if there is a control unit
    for _ in range(_MOST_STARTS):
        peer = local_socket.open_connection(path)
        if peer is None:
            log.info("no control unit listens at %s: the app runs in this process", path)
            return None
        code = code or AppCode.here(app, run_id)
        verdict, why = _handshake(peer, code)
        if verdict == READY:
            peer.settimeout(SILENCE_S)
            return peer
        peer.close()
        if verdict == REFUSED:
            log.warning("the control unit at %s is not used: %s", path, why)
            return None
    raise LinkError(
        f"the control unit at {path} keeps restarting ({_MOST_STARTS} times): see its log"
    )


def _handshake(peer: socket.socket, code: AppCode) -> tuple[str, str]:
    """Return the control unit's verdict on this code, and why; `AGAIN` if it closed to restart."""
    peer.settimeout(LOAD_S)
    try:
        local_socket.write_parcel(peer, {"version": VERSION, **asdict(code)})
        with peer.makefile("rb") as file:
            answer, _ = local_socket.read_parcel(file)
    except LinkTimeout as error:
        raise LinkTimeout(
            f"the control unit has not answered for {LOAD_S:g} s: see its log; two SuperNodes on "
            "one machine need a socket each (node-config control-unit)"
        ) from error
    except LinkError:
        return AGAIN, ""
    return answer["verdict"], answer.get("why", "")


def _exchange(peer: socket.socket, message: Message, context: Context) -> Message:
    head = local_socket.encode_order(message, context)
    state = RecordDict({**context.state})  # Flower stores the context of a round that fails, too
    try:
        local_socket.write_parcel(peer, head, message.content, state)
        with peer.makefile("rb") as file:
            answer, contents = local_socket.read_parcel(file)
            while ALIVE in answer:
                answer, contents = local_socket.read_parcel(file)
    except LinkError as error:
        raise LinkError(f"the control unit was lost while it worked on this: {error}") from error
    if "raised" in answer:
        raise _rebuild_error(*answer["raised"])
    content, context.state = contents
    if "error" in answer:
        return Message(Error(**answer["error"]), reply_to=message)
    return Message(content, reply_to=message)


def _rebuild_error(name: str, words: str) -> Exception:
    """Rebuild the CollaPipeError of this name; for other names a RunError with name and message.

    A MemberFailed carries more than words, so it becomes a LinkError.
    """
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MemberFailed):
        return LinkError(words)
    if isinstance(kind, type) and issubclass(kind, CollaPipeError):
        return kind(words)
    return RunError(f"{name}: {words}")
