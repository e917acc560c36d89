"""A ClientApp that forwards its messages to the resident control unit beside it.

    app = Relay("my_app.client_app:app")

Flower starts a process per message. This one imports flwr alone: the app itself is imported by the
control unit, once per run. If no control unit listens, the app is imported and called here.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import asdict
from pathlib import Path

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from collapipe_flwr.core import errors
from collapipe_flwr.core.errors import CollaPipeError, LinkError, LinkTimeout, RunError
from collapipe_flwr.federation import local_socket
from collapipe_flwr.federation.app_code import AppCode, load_app
from collapipe_flwr.federation.parcels import context_head, message_head, read_parcel, write_parcel

log = logging.getLogger("flwr.collapipe")
READY, AGAIN, REFUSED = "ready", "again", "refused"  # what a control unit says to `AppCode`
ALIVE = "alive"  # what it says now and then while it works
VERSION = 1
LOAD_S = 300.0  # for a board to import an app
SILENCE_S = 60.0  # of a control unit at work, until it counts as lost
_MOST_STARTS = 4  # of a control unit, until it has the code of this run


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
        peer = None if path is None else _accepted(path, self._app, context.run_id)
        if peer is None:
            app: ClientApp = load_app(self._app)
            return app(message, context)
        with peer:
            return _answered(peer, message, context)


def _accepted(path: Path, app: str, run_id: int) -> socket.socket | None:
    """A connection to a control unit that runs this code; None if there is none."""
    code = None  # its files are read only where somebody asks for them
    for _ in range(_MOST_STARTS):
        peer = local_socket.connected(path)
        if peer is None:
            log.info("no control unit listens at %s: the ClientApp works by itself", path)
            return None
        code = code or AppCode.here(app, run_id)
        verdict, why = _introduced(peer, code)
        if verdict == READY:
            peer.settimeout(SILENCE_S)
            return peer
        peer.close()
        if verdict == REFUSED:
            log.warning("the control unit at %s is not used: %s", path, why)
            return None
    raise LinkError(f"the control unit at {path} began anew {_MOST_STARTS} times: see its log")


def _introduced(peer: socket.socket, code: AppCode) -> tuple[str, str]:
    """The control unit's verdict on this code, and why; `AGAIN` if it closed to restart."""
    peer.settimeout(LOAD_S)
    try:
        write_parcel(peer, {"version": VERSION, **asdict(code)})
        with peer.makefile("rb") as file:
            told = read_parcel(file).head
    except LinkTimeout as error:
        raise LinkTimeout(
            f"the control unit has not answered for {LOAD_S:g} s: see its log; two SuperNodes on "
            "one machine need a socket each (node-config control-unit)"
        ) from error
    except LinkError:
        return AGAIN, ""
    return told["verdict"], told.get("why", "")


def _answered(peer: socket.socket, message: Message, context: Context) -> Message:
    head = {"message": message_head(message), "context": context_head(context)}
    try:
        write_parcel(peer, head, message.content, context.state)
        with peer.makefile("rb") as file:
            while ALIVE in (answer := read_parcel(file)).head:
                pass
    except LinkError as error:
        raise LinkError(f"the control unit was lost while it worked on this: {error}") from error
    if "raised" in answer.head:
        raise _error(*answer.head["raised"])
    content, context.state = answer.contents
    if "error" in answer.head:
        return Message(Error(**answer.head["error"]), reply_to=message)
    return Message(content, reply_to=message)


def _error(name: str, words: str) -> Exception:
    """The CollaPipeError of this name, else a RunError with name and message."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, CollaPipeError):
        return kind(words)
    return RunError(f"{name}: {words}")
