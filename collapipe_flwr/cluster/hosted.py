"""Stages in sessions on hosts, and the places for the last stage of a chain, the edge.

The control unit opens and fills the edge's session like that of every device, and collects its part
with the segments.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from collapipe_flwr.cluster.order import EDGE, Segments, TrainingOrder
from collapipe_flwr.core.errors import (
    CollaPipeError,
    EdgeLost,
    FrozenWanted,
    LinkError,
    LinkTimeout,
    Unreachable,
)
from collapipe_flwr.core.links import Heartbeat, LinkConfig, TlsFiles
from collapipe_flwr.core.measurements import TransferStats
from collapipe_flwr.host.service import HostService
from collapipe_flwr.host.session import Lane, SessionStream
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.compute import CPU
from collapipe_flwr.pipeline.config import NextHop, SessionKey, SessionRequest
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.offload import LazyMapping
from collapipe_flwr.pipeline.state import PartState
from collapipe_flwr.pipeline.targets import Targets
from collapipe_flwr.transport.client import HostClient
from collapipe_flwr.transport.simulated_link import make_simulated_pair

_log = logging.getLogger(__name__)
CLOSE_S = 2.0  # for a host to free a session
ENDED_S = 60.0  # for the edge's thread to end behind the last frame


class RemoteStage:
    """One stage in a session on one daemon."""

    def __init__(self, client: HostClient, request: SessionRequest) -> None:
        self.client, self.request = client, request
        self.session = client.get_session(request.key)
        self._pushed: Mapping[str, Tensor] = {}
        self._moved = TransferStats()

    def open(self, splitter: AnySplitter, order: TrainingOrder) -> None:
        """Open the session and send it its weights; wait for an edge that restarts."""
        placement = self.request.placement
        with self._translate_loss():
            if placement is None:
                self.client.attempt_patiently(lambda: self.client.open_session(self.request))
            else:
                self.client.open_session(self.request)
        own = splitter.edge_keys()
        if placement is not None:
            own = splitter.segment_keys(*placement.blocks)
        state = PartState(weights=order.weights, optimizer=order.slots)
        self._pushed = state.select((*own, *splitter.shared_keys)).flatten()
        with self._translate_loss():
            try:
                self._moved += self.session.push_missing(self._pushed)
            except FrozenWanted as wanted:
                if placement is None:
                    raise
                _log.info("%s; it gets its frozen weights from here", wanted)
                keys = splitter.resident_keys_of_segment(*placement.blocks)
                frozen = splitter.read_resident(keys)
                self._moved += self.session.push_missing(LazyMapping.join(self._pushed, frozen))

    def collect(self, keep_optimizer: bool, turn: AbstractContextManager[object]) -> Segments:
        """Fetch the report and, within ``turn``, the part, once the host has ended.

        All replicas but the first hold the same part and return their report only.
        """
        report = self.session.report()
        state = PartState(weights={})
        if not self.request.stage.turn.replica:
            tensors, moved = self.session.fetch_changed(
                self._pushed, with_optimizer=keep_optimizer, turn=turn
            )
            self._moved += moved
            came, sent = PartState.from_tensors(tensors), PartState.from_tensors(self._pushed)
            state = came.select(key for key in sent.weights if key in came.weights)  # no other's
        return Segments(state=state, reports=(report,), moved=self._moved)

    def close(self) -> None:
        """Close the session; log if the host is gone or has dropped it already.

        A host that fell silent frees it by itself later.
        """
        if self.client.silent:
            return
        try:
            self.session.close(within_s=CLOSE_S)
        except LinkError as error:
            _log.info("nothing to close: %s", error)

    @contextmanager
    def _translate_loss(self) -> Iterator[None]:
        """Turn the loss of the edge into EdgeLost: no device is to blame, and no replay helps."""
        try:
            yield
        except (Unreachable, LinkTimeout) as error:
            if self.request.placement is not None:
                raise
            raise EdgeLost(str(error)) from error


def make_edge_request(splitter: AnySplitter, order: TrainingOrder) -> SessionRequest:
    """Build the request of a new session for the last stage of this order's chain."""
    return SessionRequest(
        key=SessionKey.draw(f"{order.plan.cluster_id}-{order.server_round}"),
        spec_json=splitter.spec.to_json(),
        stage=order.edge_settings,
        optimizer=order.learning.optimizer,
        keep_optimizer=order.keep_optimizer,
        cluster_id=order.plan.cluster_id,
        run_id=order.learning.run_id,
        server_round=order.server_round,
        attempt=order.attempt,
    )


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """The last stage of a chain for devices of this process, which connect one lane each.

    ``collect`` returns the trained part, see `RemoteStage.collect`. A stage in this process gets
    its targets through ``targets``.
    """

    collect: Callable[[bool, AbstractContextManager[object]], Segments]
    connect: Callable[[LinkConfig], AbstractContextManager[Link]]
    targets: Targets | None = None


class Edge(Protocol):
    """A place for the last stage of chains whose devices are in this process."""

    def open(self, splitter: AnySplitter, order: TrainingOrder) -> AbstractContextManager[OpenEdge]:
        """Open the last stage of this order's chain with its weights; it is freed afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedEdge:
    """An edge on a host at ``address``; calls wait for ``patience_s`` while it restarts."""

    address: str
    name: str = EDGE
    certificate_name: str = ""
    tls: TlsFiles | None = None
    deadline_s: float = 20.0
    patience_s: float = 20.0
    heartbeat: Heartbeat | None = None
    service: HostService | None = None  # behind the address, where it is in this process

    @contextmanager
    def make_session(
        self, splitter: AnySplitter, order: TrainingOrder
    ) -> Iterator[tuple[RemoteStage, NextHop]]:
        """Yield an order's session, not open yet, and the hop to it; close it afterwards."""
        request = make_edge_request(splitter, order)
        with HostClient(
            self.address,
            what=self.name,
            tls=self.tls,
            certificate_name=self.certificate_name,
            deadline_s=self.deadline_s,
            patience_s=self.patience_s,
            heartbeat=self.heartbeat,
        ) as client:
            hosted = RemoteStage(client, request)
            try:
                yield (
                    hosted,
                    NextHop(
                        address=self.address,
                        key=request.key,
                        certificate_name=self.certificate_name,
                        heartbeat=self.heartbeat,
                    ),
                )
            finally:
                hosted.close()

    @contextmanager
    def open(self, splitter: AnySplitter, order: TrainingOrder) -> Iterator[OpenEdge]:
        """See `Edge.open`."""
        with self.make_session(splitter, order) as (hosted, _):
            hosted.open(splitter, order)
            yield OpenEdge(hosted.collect, hosted.session.connect, self.hold_targets(hosted))

    def hold_targets(self, hosted: RemoteStage) -> Targets | None:
        """Return the way by which an open session gets its targets; None where they travel."""
        return None if self.service is None else self.service.hold_targets(hosted.request.key)


class ThreadEdge:
    """The edge in a thread of this process, which computes on ``compute``.

    Without ``holds_targets``, targets travel in frames, as they do to an edge elsewhere.
    """

    def __init__(self, compute: torch.device = CPU, *, holds_targets: bool = True) -> None:
        self._compute, self._holds_targets = compute, holds_targets

    @contextmanager
    def open(self, splitter: AnySplitter, order: TrainingOrder) -> Iterator[OpenEdge]:
        """See `Edge.open`; the thread has ended afterwards."""
        service, request = HostService(compute=self._compute), make_edge_request(splitter, order)
        threads: list[threading.Thread] = []
        names = order.plan.segments[-1].device_ids  # that connect, by lane
        service.open(request)
        state = PartState(weights=order.weights, optimizer=order.slots)
        own = state.select((*splitter.edge_keys(), *splitter.shared_keys))
        service.push_weights(request.key, own.copy().flatten())

        def serve(stream: SessionStream) -> None:
            with suppress(CollaPipeError):  # both ends of the link report it
                service.serve(stream, stream.lanes.upstream)

        @contextmanager
        def connect(config: LinkConfig) -> Iterator[Link]:
            """Yield the body's link of one lane; the chain begins once all lanes are linked."""
            ours, theirs = make_simulated_pair(names[config.lane], EDGE, config)
            lane = Lane(config.lane, config.lanes)
            stream = service.claim(request.key, lane)
            if stream.session.enter(stream, lane, theirs):
                thread = threading.Thread(target=serve, args=(stream,), name=EDGE, daemon=True)
                threads.append(thread)
                thread.start()
            try:
                yield ours
            except BaseException as error:
                ours.close(str(error) or type(error).__name__)
                raise
            ours.close()

        def collect(keep_optimizer: bool, turn: AbstractContextManager[object]) -> Segments:
            join(ENDED_S)
            with turn:
                tensors = service.copy_weights(request.key, with_optimizer=keep_optimizer)
            report = service.report(request.key)
            return Segments(state=PartState.from_tensors(tensors), reports=(report,))

        def join(within_s: float) -> None:
            for thread in threads:
                thread.join(within_s)

        try:
            held = service.hold_targets(request.key) if self._holds_targets else None
            yield OpenEdge(collect, connect, held)
        finally:
            join(order.learning.deadline_s)
