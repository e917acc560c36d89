"""What a process of a bench can be asked to be and to do."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from benchmarks.data_plane.job import Job, Usage
from benchmarks.data_plane.ours import Driver, member_tls, serve
from benchmarks.resident import peak_bytes
from collapipe_flwr.core.json_codec import from_json, to_plain
from collapipe_flwr.host.daemon import hide_unused_libraries
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.transport.client import Dialer


class Worker:
    """One of our stages, a rank of the peer, or both in turn; never both at work at once."""

    def __init__(self, host: str, certificates: str = "") -> None:
        torch.set_num_threads(1)
        self._host = host
        self._tls = member_tls(certificates, "member")
        self._server: HostServer | None = None
        self._driver: Driver | None = None
        self._rank: object = None

    def serve(self, asked: Mapping[str, str]) -> object:
        """Become a host; its address."""
        del asked
        if self._server is None:
            self._server = serve(self._host, self._tls).__enter__()
        return self._server.address

    def sink(self, asked: Mapping[str, str]) -> object:
        """Become a host that throws away what it receives; its address."""
        from benchmarks.data_plane.wire import Sink

        del asked
        if self._server is None:
            self._server = HostServer(f"{self._host}:0", Sink(), tls=self._tls).__enter__()
        return self._server.address

    def host(self, asked: Mapping[str, str]) -> object:
        """Become a host of transformers parts, as a device is; its address."""
        del asked
        hide_unused_libraries()
        service = HostService(connect=Dialer(name="device", tls=self._tls))
        self._server = HostServer(f"{self._host}:0", service, tls=self._tls).__enter__()
        return self._server.address

    def whole(self, asked: Mapping[str, str]) -> object:
        """Train the whole model of a memory case in this process."""
        from benchmarks.data_plane.memory import MemoryCase, train_whole_model

        train_whole_model(from_json(MemoryCase, asked["case"], "case"))
        return None

    def drive(self, asked: Mapping[str, str]) -> object:
        """Become the first stage of a chain of ``addresses``, separated by blanks."""
        job = from_json(Job, asked["job"], "job")
        self._driver = Driver(job, asked["addresses"].split(), self._tls)
        return None

    def join(self, asked: Mapping[str, str]) -> object:
        """Become a rank of the peer."""
        from benchmarks.data_plane.theirs import Rank

        job = from_json(Job, asked["job"], "job")
        self._rank = Rank(job, int(asked["rank"]), asked["store"])
        return None

    def steps(self, asked: Mapping[str, str]) -> object:
        """Train some steps."""
        runner = self._driver or self._rank
        return to_plain(runner.steps(int(asked["count"])))  # type: ignore[attr-defined]

    def close(self, asked: Mapping[str, str]) -> object:
        """End the chain or leave the group; the steps of a chain."""
        del asked
        runner, self._driver, self._rank = self._driver or self._rank, None, None
        return to_plain(runner.close())  # type: ignore[attr-defined]

    def usage(self, asked: Mapping[str, str]) -> object:
        """CPU seconds so far and peak memory."""
        del asked
        return to_plain(Usage(cpu_s=time.process_time(), peak_bytes=peak_bytes()))
