"""`flwr-clientapp` that starts at once: a fork of a process that has imported Flower's program.

    python -P client_process.py [ARGUMENT...]

is that program without the imports of Flower's others, a web server and a database among them.
`offered` puts one first on the path of those that start it by name. Run as a file, so that an
app's own copy of this package is the one that it imports.
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
_LONGEST = 120  # bytes of an interpreter's path in a script's first line, on every kernel
_FORKS = "--forks-at"
_LENGTH = 4  # bytes of an order's length
_GRACE_S = 5.0  # for a fork whose program was killed, to tell its SuperNode


@contextmanager
def offered() -> Iterator[None]:
    """In the body, processes started with this environment find our program."""
    python = sys.executable
    if len(os.fsencode(python)) > _LONGEST or any(map(str.isspace, python)):
        yield  # a script cannot name it
        return
    before = os.environ.get("PATH", os.defpath)
    with tempfile.TemporaryDirectory(prefix="collapipe-supernode-") as name, _forks(Path(name)):
        folder = Path(name)
        program = folder / _PROGRAM
        code = Path(__file__).with_name("client_program.py").read_text(encoding="utf-8")
        program.write_text(f"#!{python} -IS\n{code}", encoding="utf-8")
        program.chmod(0o700)
        (folder / "alone").write_text(__file__, encoding="utf-8")
        os.environ["PATH"] = f"{folder}{os.pathsep}{before}"
        try:
            yield
        finally:
            os.environ["PATH"] = before


@contextmanager
def _forks(folder: Path) -> Iterator[None]:
    """In the body forks are made at a socket in ``folder``, on Linux.

    Elsewhere the system's libraries may not be used after a fork.
    """
    if sys.platform != "linux":
        yield
        return
    command = [sys.executable, "-P", __file__, _FORKS, str(folder / "fork")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:  # which ends with its stdin
        try:
            yield
        finally:
            server.terminate()


def main() -> None:
    """Flower's `flwr-clientapp`, or what forks it."""
    above, _, name = _PACKAGE.rpartition(".")
    package = ModuleType(_PACKAGE)
    package.__path__ = [f"{folder}/{name}" for folder in importlib.import_module(above).__path__]
    sys.modules[_PACKAGE] = package  # whose own code would import the other programs
    program: Callable[[], Any] = importlib.import_module(
        f"{_PACKAGE}.flwr_clientapp"
    ).flwr_clientapp
    if sys.argv[1:2] != [_FORKS]:
        program()
    elif (peer := _fork(sys.argv[2])) is not None:
        _run(program, peer)


def _fork(path: str) -> socket.socket | None:
    """A connection to serve in every fork; None in the process itself, when its stdin has ended."""
    gc.freeze()  # so that forks share what was imported
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            peer, _ = listener.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return peer
            peer.close()
    shutil.rmtree(Path(path).parent, ignore_errors=True)  # a SuperNode that was killed left it
    return None


def _run(program: Callable[[], Any], peer: socket.socket) -> None:
    """Flower's program in the place of ``client_program`` at the other end."""
    length, streams, *_ = socket.recv_fds(peer, _LENGTH, 3)
    with peer.makefile("rb") as file:
        sys.argv, folder, environment = marshal.loads(file.read(int.from_bytes(length, "big")))
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy.random" in sys.modules:  # Python's own generator begins anew by itself
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
        code = end.code if isinstance(end.code, int) else 1
        raise
    finally:
        over.set()
        with suppress(OSError):
            peer.sendall(bytes([code]))


def _end_with(peer: socket.socket, over: threading.Event) -> None:
    """Where the other end is killed before it is over: end too, in good order if that is soon."""
    with suppress(OSError):
        peer.recv(1)
    if over.is_set():
        return
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
