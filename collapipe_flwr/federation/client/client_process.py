"""`flwr-clientapp` that starts at once: a fork of a process that has imported Flower's program.

    python -P client_process.py [ARGUMENT...]

is that program without the imports of Flower's others, a web server and a database among them.
`offer_fast_program` puts a faster one, which asks this process for a fork, first on the path. Run
as a file, so that an app imports its own copy of this package.
"""

from __future__ import annotations

import gc
import importlib
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

_PROGRAM = "flwr-clientapp"
_PACKAGE = "flwr.supernode.cli"
_SCRIPT = """#!{python} -IS
import sys
sys.path.append({place!r})
from client_program import main
sys.exit(main({socket!r}, {alone!r}))
"""
_LONGEST = 120  # bytes of an interpreter's path in a script's first line, on every kernel
_LONGEST_SOCKET = 107  # bytes of a socket's path
_FORKS = "--forks-at"
_TOLD_S = 0.5  # within which a stop of all processes has reached a fork, too
_GRACE_S = 5.0  # for a fork whose program was killed, to tell its SuperNode
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def offer_fast_program() -> Iterator[None]:
    """Put a faster `flwr-clientapp` first on the path of child processes during the body."""
    python = sys.executable
    if len(os.fsencode(python)) > _LONGEST or any(map(str.isspace, python)):
        yield  # a script's first line cannot contain it
        return
    before = os.environ.get("PATH", os.defpath)
    with tempfile.TemporaryDirectory(prefix="collapipe-supernode-") as folder:
        program = Path(folder) / _PROGRAM
        program.write_text(build_script(Path(folder) / "fork"), encoding="utf-8")
        program.chmod(0o700)
        with _serve_forks(Path(folder) / "fork"):
            os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
            try:
                yield
            finally:
                os.environ["PATH"] = before


def build_script(forks_at: Path) -> str:
    """Return the text of the program; ``forks_at`` is the socket of the fork server."""
    place = str(Path(__file__).parent)
    return _SCRIPT.format(python=sys.executable, place=place, socket=str(forks_at), alone=__file__)


@contextmanager
def _serve_forks(path: Path) -> Iterator[None]:
    """Run the fork server at the socket ``path`` during the body.

    On Linux only: elsewhere system libraries may not be used after a fork.
    """
    if sys.platform != "linux" or len(os.fsencode(path)) > _LONGEST_SOCKET:
        yield
        return
    command = [sys.executable, "-P", __file__, _FORKS, str(path)]
    # It ends with its stdin; in a session of its own it survives signals to the process group.
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
        yield  # and then its stdin is closed


def main() -> None:
    """Run Flower's `flwr-clientapp`, or the fork server."""
    above, _, name = _PACKAGE.rpartition(".")
    package = ModuleType(_PACKAGE)
    package.__path__ = [f"{folder}/{name}" for folder in importlib.import_module(above).__path__]
    sys.modules[_PACKAGE] = package  # whose own code would import the other programs
    module = importlib.import_module(f"{_PACKAGE}.flwr_clientapp")
    if sys.argv[1:2] != [_FORKS]:
        module.flwr_clientapp()
    elif (peer := _fork(sys.argv[2])) is not None:
        _run(module.flwr_clientapp, peer)


def _fork(path: str) -> socket.socket | None:
    """Serve forks; returns a connection in each of them, None here once stdin has ended."""
    gc.freeze()  # so that forks share what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    before = [signal.signal(stop, signal.SIG_IGN) for stop in _STOPS]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}~")
        listener.listen()
        os.rename(f"{path}~", path)  # a client that sees the socket can connect
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            peer, _ = listener.accept()
            try:
                child = os.fork()
            except OSError:  # out of memory or processes: the program runs Flower's itself
                child = -1
            if not child:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for stop, handler in zip(_STOPS, before, strict=True):
                    signal.signal(stop, handler)
                return peer
            peer.close()
    shutil.rmtree(Path(path).parent, ignore_errors=True)  # left by a SuperNode that was killed
    return None


def _run(program: Callable[[], Any], peer: socket.socket) -> None:
    """Run Flower's program on behalf of the ``client_program`` at the other end."""
    try:
        peer.sendall(b"+")
        begun, streams, *_ = socket.recv_fds(peer, 1, 3)
    except OSError:
        begun = b""
    if not begun:  # it has given up
        return
    with peer.makefile("rb") as file:
        sys.argv, folder, environment = marshal.load(file)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy.random" in sys.modules:  # Python reseeds its own generator
        sys.modules["numpy.random"].seed()
    # Flower's threads end the process by a signal, which would not wake a main thread that waits.
    signal.raise_signal = partial(signal.pthread_kill, threading.get_ident())
    over = threading.Event()
    threading.Thread(target=_end_with, args=(peer, over), daemon=True).start()
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code & 255 if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        over.set()
        with suppress(OSError):
            peer.sendall(bytes([code]))


def _end_with(peer: socket.socket, over: threading.Event) -> None:
    """End this process if the other end is killed, by SIGTERM first and SIGKILL later."""
    with suppress(OSError):
        peer.recv(1)
    if over.is_set():
        return
    time.sleep(_TOLD_S)
    if callable(signal.getsignal(signal.SIGTERM)):  # not ending yet
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
