"""A host of model parts: one replica per session, trained by one stream at a time.

The sessions of the edge server hold the last part of the model, one per cluster. Those of a device
have a placement: they hold a segment and pass activations on. Knows no transport.

A session is opened with a model and a token, gets weights, and then runs streams of steps of one
cluster. A stream that fails may leave the replica in the middle of a step, so its session ends: the
control unit opens another and sends it the weights before the step. `session` defines the life of a
session, `ledger` what it may hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.core.json_log import add_log_fields
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.core.schedule import list_stage_actions
from collapipe_flwr.host.energy import EnergyMeter
from collapipe_flwr.host.ledger import Account, Ledger, NoRoom
from collapipe_flwr.host.metrics import Tally
from collapipe_flwr.host.parts import FOUND, BuildPart, Parts, collect_tensors, list_trained_keys
from collapipe_flwr.host.session import ONLY, HostSession, Lane, SessionRefused, SessionStream
from collapipe_flwr.host.sessions import SessionTable
from collapipe_flwr.host.stores import TensorStore, WeightCache
from collapipe_flwr.pipeline.compute import CPU, AllocatorPeak
from collapipe_flwr.pipeline.config import Health, NextHop, SessionKey, SessionRequest
from collapipe_flwr.pipeline.gradient_sums import Siblings
from collapipe_flwr.pipeline.link import Link, join_links
from collapipe_flwr.pipeline.meter import count_bytes
from collapipe_flwr.pipeline.roles import LastStage, MiddleStage
from collapipe_flwr.pipeline.soundness import make_neighbours_error
from collapipe_flwr.pipeline.state import compute_digests
from collapipe_flwr.pipeline.targets import Targets

Connect = Callable[[NextHop], AbstractContextManager[Link]]
Reserve = Callable[[int], None]
Receive = Callable[[Reserve], Mapping[str, Tensor]]

_AT_WORK_S = 300.0  # since a session was used: weights may be on their way; later it was left

_log = logging.getLogger(__name__)


def build_transformers_part(request: SessionRequest, weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a segment of a transformers model, or its last part where no blocks are placed."""
    from collapipe_flwr.models.splitter import splitter_of  # slow imports: only when needed

    splitter = splitter_of(request.spec_json)
    if request.placement is None:
        return splitter.build_edge(weights)
    return splitter.build_segment(*request.placement.blocks, weights)


def refuse_next_hop(hop: NextHop) -> AbstractContextManager[Link]:
    """Refuse to connect: this host is always the last one of a chain."""
    raise ConfigError(f"this host passes nothing on, so it cannot connect to {hop.address}")


class HostService:
    """Holds up to `most_sessions` sessions; every method may be called from any thread.

    Their memory is reserved in `ledger`. Parts `compute` on one device; weights come and go as CPU
    tensors.
    """

    def __init__(
        self,
        build_part: BuildPart = build_transformers_part,
        *,
        connect: Connect = refuse_next_hop,
        most_sessions: int = 64,
        forget_after_s: float = 6 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
        store: TensorStore | None = None,
        cache: WeightCache | None = None,
        set_power: Callable[[float], None] | None = None,
        meter: EnergyMeter | None = None,
        ledger: Ledger | None = None,
        compute: torch.device = CPU,
        tally: Tally | None = None,
    ) -> None:
        self.tally = tally or Tally()
        self.compute = compute
        self._set_power = set_power
        self._meter = meter or EnergyMeter()
        self._store = store
        self._cache = cache
        self._clock = clock
        self._parts = Parts(build_part, cache, compute)
        self._connect = connect
        self._ledger = ledger or Ledger()
        self.sessions = SessionTable(most_sessions, forget_after_s, clock, self._let_go)
        self._targets: dict[str, Targets] = {}  # by session whose first stage is in this process

    def open(
        self,
        request: SessionRequest,
        *,
        most_of_opener: int | None = None,
        share_of_opener: float = 1.0,
    ) -> None:
        """Open a session. Raises SessionRefused when the id is taken or the host is full.

        See `SessionTable.add` for `most_of_opener`. All sessions of its opener together may hold
        `share_of_opener` of the memory.
        """
        list_stage_actions(request.stage.schedule, request.stage.depth, 1)
        most_bytes = int(self._ledger.most_bytes * share_of_opener)
        account = Account(self._ledger, request.opener, most_bytes)
        self.sessions.add(request, account, most_of_opener=most_of_opener)
        with add_log_fields(**request.about):
            _log.info("session opened for %s", request.part)

    def hold_targets(self, key: SessionKey) -> Targets:
        """Let this process pass targets to a session directly instead of in frames."""
        self.find(key)
        return self._targets.setdefault(key.session_id, Targets())

    def find_missing(self, key: SessionKey, digests: Mapping[str, str]) -> tuple[str, ...]:
        """Return the keys of the weights that the next push must bring; the host has the others.

        The store hands over what is wanted and forgets the rest, so that nothing of an earlier
        round stays beside the part.
        """
        session = self.find(key)
        wanted = frozenset(digests.values())
        with session.keep_at_rest():
            found = {d: tensor for d, tensor in session.found.items() if d in wanted}
            if self._store is not None:
                found |= self._store.take(wanted)
            if session.lacks_checkpoint and self._cache is not None:
                found |= self._cache.find({d: d for d in wanted - found.keys()})
            try:
                session.account.reserve({FOUND: count_bytes(found.values())})
            except NoRoom:
                found = {}
                session.account.reserve({FOUND: 0})
            session.found, session.wanted = found, digests
            return tuple(key for key, digest in digests.items() if digest not in found)

    def push_weights(self, key: SessionKey, tensors: Mapping[str, Tensor]) -> None:
        """Set the weights to local tensors; optimizer slots among them are not copied."""

        def receive(reserve: Reserve) -> Mapping[str, Tensor]:
            reserve(count_bytes(tensors.values()))
            return tensors

        self.receive_weights(key, receive)

    def receive_weights(self, key: SessionKey, receive: Receive) -> None:
        """Set the weights of a session's part, and the optimizer's slots that are among them.

        `receive` returns them (`PartState.flatten`) and reserves the bytes of each before it
        arrives; the tensors that `find_missing` found here are added. The new part and optimizer
        replace those of the session once all is checked: an error before that leaves the session as
        it was. Raises ModelError when keys or shapes are not those of the part, NoRoom when the
        host may not hold so much.
        """
        session = self.find(key)
        with session.account.name_arrival() as arrived:
            tensors = receive(lambda size: session.account.add(arrived, size))
            with session.keep_at_rest():
                self._parts.replace(session, tensors, arrived)

    @contextmanager
    def read(self, key: SessionKey, *, with_optimizer: bool = False) -> Iterator[dict[str, Tensor]]:
        """Read the tensors of a session's part without a copy; it does not change in the body."""
        session = self.find(key)
        with session.keep_at_rest():
            self._parts.require_part(session)
            yield collect_tensors(session, with_optimizer)

    def copy_weights(self, key: SessionKey, *, with_optimizer: bool = False) -> dict[str, Tensor]:
        """Copy what `read` gives."""
        with self.read(key, with_optimizer=with_optimizer) as tensors:
            return {key: tensor.detach().clone() for key, tensor in tensors.items()}

    def digest_weights(self, key: SessionKey, *, with_optimizer: bool = False) -> dict[str, str]:
        """Return content digests of what `copy_weights` gives, "" for what training has changed.

        Computing those as well would take a slow board longer than the training did.
        """
        with self.read(key, with_optimizer=with_optimizer) as tensors:
            changed = list_trained_keys(self.find(key))
            still = {name: tensor for name, tensor in tensors.items() if name not in changed}
            return {**dict.fromkeys(tensors, ""), **compute_digests(still)}

    def report(self, key: SessionKey) -> StageMeasurement:
        """Return what a session measured since its weights were set.

        Streams that ended in good order add up. One that failed does not count, because its steps
        are replayed.
        """
        report = self.find(key).report
        if report is None:
            raise SessionRefused(f"session {key.session_id} has not run yet")
        return report

    def close(self, key: SessionKey) -> None:
        """Forget a session, ending a stream that still runs; returns when nothing uses its part.

        A store keeps its weights, and slots where asked for, for the next session, unless a stream
        was broken off. Raises SessionRefused when a step does not end in time; the session is
        forgotten when it does.
        """
        session = self.find(key)
        whole = session.close("the session was closed")
        if whole and self._store is not None and session.part is not None:
            self._store.keep(collect_tensors(session, session.request.keep_optimizer).values())
        session.empty()

    def break_off(self, why: str) -> None:
        """End all streams, without waiting for them."""
        for session in self.sessions.list_sessions():
            session.cut(why)

    def measure_load(self) -> Health:
        """Count the sessions and what they hold."""
        sessions = self.sessions.list_sessions()
        return Health(
            sessions=len(sessions),
            running=sum(session.stream is not None for session in sessions),
            most_sessions=self.sessions.most_sessions,
            held_bytes=self._ledger.held_bytes,
            most_bytes=self._ledger.most_bytes,
        )

    def is_at_work(self) -> bool:
        """Return whether a stream runs, or a session was used a short time ago."""
        since_s = self._clock() - _AT_WORK_S
        sessions = self.sessions.list_sessions()
        return any(s.stream is not None or s.used_s > since_s for s in sessions)

    def count_spare_bytes(self) -> int:
        """Return the bytes in use now that the next session can have."""
        here = self._store if self.compute == CPU else None
        return here.held_bytes if here is not None else 0

    def find(self, key: SessionKey) -> HostSession:
        """Find a session. Raises SessionRefused when the id or the token is wrong."""
        return self.sessions.find(key)

    def run(self, key: SessionKey, upstream: Link) -> None:
        """Run a session's stage over one link until its END frame."""
        self.serve(self.claim(key), upstream)

    def claim(self, key: SessionKey, lane: Lane = ONLY) -> SessionStream:
        """Reserve a session for one stream, for `serve` to run or `release` to give up.

        The lanes of one stream claim it one after the other, in any order.
        """
        session = self.find(key)
        with session.claiming:
            if (stream := session.join(lane)) is not None:
                return stream
            with session.keep_at_rest():
                self._parts.require_part(session)
                return session.claim(lane)

    def release(self, stream: SessionStream, why: str = "the stream was given up") -> None:
        """Give up a stream that is not over; the peers of all its lanes hear why."""
        stream.session.cut(why, stream)

    def serve(self, stream: SessionStream, upstream: Link, behind: Link | None = None) -> None:
        """Run a claimed stream; `behind` is the link from the next replica of its stage.

        A failure ends the session and is raised. Raises SessionRefused, without running, for a
        stream that was broken off since.
        """
        session = stream.session
        try:
            session.begin(stream, upstream)
        except SessionRefused as error:
            upstream.close(str(error))
            raise
        try:
            with (
                self._meter.meter_interval() as used,
                self._open_stage(stream, upstream, behind) as stage,
            ):
                peak = AllocatorPeak(self.compute, count_bytes(stage.tensors))
                session.recorder = stage.recorder
                stage.serve()
            measured = stage.report()
            most_bytes = max(measured.peak_tensor_bytes, peak.num_bytes)
            report = replace(measured, energy_j=used.joules, peak_tensor_bytes=most_bytes)
            session.count(report, stage.recorder.count("test"))
            self.tally.count(session.request, report)
            _log.info("a stream of %d steps has ended", report.steps)
        except BaseException as error:
            session.fail(str(error) or type(error).__name__)
            self.tally.fail(session.request)
            upstream.close(make_neighbours_error(error, session.request.stage.name))
            raise
        finally:
            session.recorder = None
            session.end(stream)

    def _let_go(self, session: HostSession) -> None:
        """Free what a session held, once it has left the table."""
        session.account.close()
        self._targets.pop(session.request.key.session_id, None)
        with add_log_fields(**session.request.about):
            _log.info("session closed after %d steps", session.steps)

    @contextmanager
    def _open_stage(
        self, stream: SessionStream, upstream: Link, behind: Link | None
    ) -> Iterator[LastStage | MiddleStage]:
        """Open the stage of a session, with its links to the hosts behind it."""
        session = stream.session
        assert session.part is not None and session.optimizer is not None
        part, optimizer = session.part, session.optimizer
        config, placement = session.request.stage, session.request.placement
        if placement is None:
            targets = self._targets.get(session.request.key.session_id)
            yield LastStage(part, optimizer, config, upstream=upstream, targets=targets)
            return
        if self._set_power is not None and placement.tx_power_w is not None:
            self._set_power(placement.tx_power_w)
        with ExitStack() as stack:

            def connect(hop: NextHop) -> Link:
                link = stack.enter_context(self._connect(hop))
                session.add_link(stream, link)
                return link

            siblings = None
            if config.turn.replicas > 1:
                ahead = connect(placement.sibling) if placement.sibling is not None else None
                siblings = Siblings(ahead, behind, config.turn.replica)
            downstream = join_links([connect(hop) for hop in placement.next_hops], config.turn)
            ends = {"upstream": upstream, "downstream": downstream}
            yield MiddleStage(part, optimizer, config, siblings=siblings, **ends)
