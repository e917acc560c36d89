"""Worker processes of a benchmark, one per stage, controlled by their parent over pipes."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import child_environment
from benchmarks.data_plane.network import Network
from collapipe_flwr.core.errors import CollaPipeError

DEADLINE_S = 300.0
_STOP_S = 10.0
# One thread each, as a board's core would; gloo's warnings about host names say nothing here.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


class BenchError(CollaPipeError):
    """A process of the bench broke off or stayed silent."""


class Crew:
    """Workers on the places of a network; use as a context manager."""

    def __init__(self, size: int, network: Network, certificates: str = "") -> None:
        self._workers = [
            _start(network.command(index), network, index, certificates) for index in range(size)
        ]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.close()
            worker.stdout.close()
        for worker in self._workers:
            try:
                worker.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(_STOP_S)

    def ask(self, index: int, do: str, **details: object) -> Any:
        """One question to one worker. Raises BenchError when it does not answer in time."""
        self._put(index, do, details)
        return self._get(index)

    def ask_all(self, do: str, each: Sequence[Mapping[str, object]]) -> list[Any]:
        """Questions to the first workers at once; the answers in their order."""
        for index, details in enumerate(each):
            self._put(index, do, details)
        return [self._get(index) for index in range(len(each))]

    def _put(self, index: int, do: str, details: Mapping[str, object]) -> None:
        pipe = self._workers[index].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps({"do": do, **details}).encode() + b"\n")
            pipe.flush()
        except OSError as error:
            raise BenchError(f"process {index} of the bench has ended") from error

    def _get(self, index: int) -> Any:
        pipe = self._workers[index].stdout
        assert pipe is not None
        if not select.select([pipe], [], [], DEADLINE_S)[0]:
            raise BenchError(f"process {index} of the bench said nothing within {DEADLINE_S:g} s")
        line = pipe.readline()
        if not line:
            raise BenchError(f"process {index} of the bench has ended: see its words above")
        return json.loads(line)


def _start(
    command: Sequence[str], network: Network, index: int, certificates: str
) -> subprocess.Popen[bytes]:
    arguments = [network.host(index), *([certificates] if certificates else [])]
    return subprocess.Popen(
        [*command, sys.executable, "-m", "benchmarks.data_plane.member", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**child_environment(), **_ENVIRONMENT, "GLOO_SOCKET_IFNAME": network.interface},
    )
