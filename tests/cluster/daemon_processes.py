"""Real daemons on loopback: `collapipe device` and `collapipe edge` as processes of their own."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collapipe_flwr.transport.tls import TlsFiles
from tests.forked import Process, start

ROOT = Path(__file__).parents[2]
START_S = 60.0


class Daemon:
    """One process; `address` is where it listens.

    One that starts `cold` imports what it needs itself; modules in `first` go before all others.
    With `slow` it is a `slow_board` that obeys this file.
    """

    def __init__(
        self,
        command: str,
        *options: str,
        tls: TlsFiles | None = None,
        first: Path | None = None,
        cold: bool = False,
        slow: Path | None = None,
    ) -> None:
        module = "collapipe_flwr.cli" if slow is None else "tests.cluster.slow_board"
        arguments = [command, "--listen", "127.0.0.1:0", *options, *tls_options(tls)]
        path = os.pathsep.join(str(folder) for folder in (first, ROOT) if folder is not None)
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        env["SLOW_BOARD"] = str(slow or "")
        self.process = start(module, *arguments, env=env, cold=cold or first is not None)
        self.address = ""

    def wait_until_it_listens(self) -> None:
        self.address = first_line(self.process).rpartition(" ")[2]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def where_torch_never_loads(folder: Path) -> Path:
    """For `Daemon`'s `first`: importing torch waits for as long as the process lives."""
    never = folder / "never"
    os.mkfifo(never)
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Never:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        return open({str(never)!r}) if name == 'torch' else None\n"
        "sys.meta_path.insert(0, Never())\n"
    )
    return folder


def first_line(process: Process) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(START_S), "the daemon did not start"
    line = process.stdout.readline().strip()
    assert line, f"the daemon ended with {process.wait(60)}"
    return line


def tls_options(tls: TlsFiles | None) -> list[str]:
    if tls is None:
        return []
    pairs = {"--tls-ca": tls.ca, "--tls-cert": tls.certificate, "--tls-key": tls.key}
    return [word for name, path in pairs.items() for word in (name, str(path))]


@contextmanager
def running(*daemons: Daemon) -> Iterator[tuple[Daemon, ...]]:
    """All of them listen while the body runs."""
    try:
        for daemon in daemons:
            daemon.wait_until_it_listens()
        yield daemons
    finally:
        for daemon in daemons:
            daemon.stop()
