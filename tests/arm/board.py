"""`collapipe device` of an arm64 board: another processor, another torch, no Flower."""

from __future__ import annotations

import subprocess

from collapipe_flwr.transport.tls import TlsFiles
from tests.arm.root import ArmRoot
from tests.cluster.daemon_processes import Daemon, tls_options


class ArmBoard(Daemon):
    """A `Daemon` in the arm64 root; emulated, it takes a minute or more to load its libraries."""

    def __init__(self, command: str, *options: str, tls: TlsFiles | None = None) -> None:
        self._words = ["-m", "collapipe_flwr.cli", command, *options, *tls_options(tls)]
        self.address = "127.0.0.1:0"
        self._begin()

    def restart(self) -> None:
        """Kill it, and start it again at its address."""
        self.stop()
        self._begin()
        self.wait_until_it_listens()

    def _begin(self) -> None:
        root = ArmRoot.cached()
        self.process = subprocess.Popen(
            root.command(*self._words, "--listen", self.address),
            env=root.environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_it_listens(self) -> None:
        """However long that takes: the test has a deadline."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"the board ended with {self.process.wait()}"
        self.address = line.rpartition(" ")[2]
