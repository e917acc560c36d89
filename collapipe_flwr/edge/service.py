"""A host of model parts: one replica per session, trained by one stream at a time.

The edge server is such a host: its sessions hold the last part of the model, one per cluster. A
device is one too: a session with a next hop holds a segment and passes activations on. Knows no
transport.

A session is opened with a model and a token, gets weights, and then runs streams of steps of one
cluster. When a stream fails the replica may stand in the middle of a step: a recoverable session
goes back to its last snapshot, any other is gone; the round's first weights are still where they
came from. With a vault, snapshots survive a restart of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from collapipe_flwr.core.errors import CheckpointMissing, ConfigError
from collapipe_flwr.edge.frozen import FrozenCache
from collapipe_flwr.edge.power import PowerControl, RadioAsItIs
from collapipe_flwr.edge.sessions import HostedPart, Saved, Session, SessionRefused, SessionTable
from collapipe_flwr.edge.store import TensorStore
from collapipe_flwr.edge.vault import Kept, Vault
from collapipe_flwr.pipeline.digest import digests_of
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.meter import StageReport
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import LastStage, MiddleStage
from collapipe_flwr.pipeline.schedule import stage_actions
from collapipe_flwr.pipeline.session import Health, NextHop, SessionRequest, Timeline
from collapipe_flwr.pipeline.stage_settings import StageSettings
from collapipe_flwr.pipeline.state import PartState, load_slots, slots_of, state_of

BuildPart = Callable[[SessionRequest, Mapping[str, Tensor]], HostedPart]
Connect = Callable[[NextHop], AbstractContextManager[Link]]


def build_transformers_part(request: SessionRequest, weights: Mapping[str, Tensor]) -> HostedPart:
    """A segment of a transformers model, or its last part where no blocks are named."""
    from collapipe_flwr.models.spec import ModelSpec  # slow imports: only when needed
    from collapipe_flwr.models.splitter import Splitter

    splitter = Splitter(ModelSpec.from_json(request.spec_json))
    if request.blocks is None:
        return splitter.build_edge(weights)
    return splitter.build_segment(*request.blocks, weights)


def refuse_next_hop(hop: NextHop) -> AbstractContextManager[Link]:
    """How a host connects that is always last."""
    raise ConfigError(f"this host passes nothing on, so it cannot connect to {hop.address}")


class EdgeService:
    """Holds up to `most_sessions` sessions; every method may be called from any thread."""

    def __init__(
        self,
        build_part: BuildPart = build_transformers_part,
        *,
        connect: Connect = refuse_next_hop,
        most_sessions: int = 64,
        forget_after_s: float = 6 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
        vault: Vault | None = None,
        store: TensorStore | None = None,
        frozen: FrozenCache | None = None,
        power: PowerControl | None = None,
    ) -> None:
        self._power = power or RadioAsItIs()
        self._store = store
        self._frozen = frozen
        self._build_part = build_part
        self._connect = connect
        self._sessions = SessionTable(most_sessions, forget_after_s, clock)
        self._vault = vault
        for kept in vault.read() if vault is not None else ():
            session = self._sessions.add(kept.request)
            session.saved = Saved(step=kept.step, state=kept.state, report=kept.report)
            session.go_back()

    def open(self, request: SessionRequest, *, most_of_opener: int | None = None) -> None:
        """Make a session. Raises SessionRefused when the id is taken or the host is full.

        See `SessionTable.add` for `most_of_opener`.
        """
        stage_actions(request.schedule, request.depth, 1)
        self._sessions.add(request, most_of_opener=most_of_opener)
        if self._vault is not None:
            self._vault.keep_only(self._sessions.ids())

    def missing(self, session_id: str, token: str, digests: Mapping[str, str]) -> tuple[str, ...]:
        """Which of these weights the next `push_weights` must bring; the others were kept here."""
        session = self.find(session_id, token)
        with session.at_rest():
            session.kept = self._store.find(digests) if self._store is not None else {}
            if session.lacks_checkpoint and self._frozen is not None:
                session.kept |= self._frozen.find(digests)
            return tuple(key for key in digests if key not in session.kept)

    def push_weights(
        self,
        session_id: str,
        token: str,
        weights: Mapping[str, Tensor],
        *,
        keep_optimizer: bool = False,
    ) -> None:
        """Set the weights of a session's part, which the first call builds.

        Optimiser slots among them (`PartState.tensors`) are set as well, and what `missing` found
        here is added. Raises ModelError when the keys or shapes are not those of the part.
        """
        session = self.find(session_id, token)
        with session.at_rest():
            state = PartState.of_tensors({**session.kept, **weights})
            session.kept = {}
            if session.part is None:
                session.part = self._first_part(session, state.weights, weights)
            else:
                session.part.load_weights(state.weights)
            if session.optimizer is None or not keep_optimizer:
                session.optimizer = Optimizer(session.request.optimizer, session.part.parameters())
            if state.slots:
                load_slots(_module(session), session.optimizer, state.slots)
            session.steps, session.report = 0, None
            session.pushed_bytes = sum(t.nbytes for t in weights.values())
            if session.request.recoverable:
                self._save(session, state.weights)

    def _first_part(
        self, session: Session, weights: Mapping[str, Tensor], pushed: Mapping[str, Tensor]
    ) -> HostedPart:
        """Build the part; frozen weights that had to be pushed need not come again."""
        try:
            part = self._build_part(session.request, weights)
        except CheckpointMissing:
            session.lacks_checkpoint = True
            raise
        if session.lacks_checkpoint and self._frozen is not None:
            told = part.state_dict()
            self._frozen.keep({key: t for key, t in pushed.items() if key not in told})
        return part

    def weights(
        self, session_id: str, token: str, *, with_optimizer: bool = False
    ) -> dict[str, Tensor]:
        """A copy of the weights of a session's part, with optimiser slots where asked for."""
        session = self.find(session_id, token)
        with session.at_rest():
            return {k: t.detach().clone() for k, t in self._now(session, with_optimizer).items()}

    def digests(
        self, session_id: str, token: str, *, with_optimizer: bool = False
    ) -> dict[str, str]:
        """The content digests of what `weights` would give."""
        session = self.find(session_id, token)
        with session.at_rest():
            return digests_of(self._now(session, with_optimizer))

    def _now(self, session: Session, with_optimizer: bool) -> dict[str, Tensor]:
        weights = self._part(session).state_dict()
        if not with_optimizer:
            return weights
        assert session.optimizer is not None
        slots = slots_of(_module(session), session.optimizer)
        return PartState(weights=weights, slots=slots).tensors()

    def snapshot(self, session_id: str, token: str, step: int) -> None:
        """Keep the state after `step` steps instead of the last one; twice is allowed.

        Raises SessionRefused when the session does not stand there.
        """
        session = self.find(session_id, token)
        with session.at_rest():
            self._part(session)
            if session.saved is None or session.steps != step:
                raise SessionRefused(f"the session stands after step {session.steps}, not {step}")
            if session.saved.step != step:
                self._save(session, session.saved.state.weights)

    def rollback(self, session_id: str, token: str, step: int) -> None:
        """Go back to the snapshot after `step` steps, ending a stream that still runs.

        Raises SessionRefused when the last snapshot is another.
        """
        session = self.find(session_id, token)
        session.break_off("rolled back to replay steps")
        with session.at_rest():
            if session.saved is None or session.saved.step != step:
                raise SessionRefused(f"the session has no snapshot after step {step}")
            session.go_back()

    def report(self, session_id: str, token: str) -> StageReport:
        """What a session measured since its weights were set, over all steps that count.

        Streams that ended in good order add up. A step that was not kept does not count: a stream
        that failed, or one that was rolled back, is replayed, so its bytes, seconds and gradients
        would be those of the same work twice.
        """
        report = self.find(session_id, token).report
        if report is None:
            raise SessionRefused(f"session {session_id} has not run yet")
        return report

    def timeline(self, session_id: str, token: str) -> Timeline:
        """What a session did when, over the same steps as its report."""
        report = self.find(session_id, token).report
        return Timeline(spans=report.spans if report is not None else ())

    def close(self, session_id: str, token: str) -> None:
        """Forget a session, ending a stream that still runs.

        With a store its weights, and slots where asked for, are kept until the next one closes.
        """
        session = self.find(session_id, token)
        self._forget(session)
        if self._store is not None and session.part is not None and not session.running:
            self._store.keep(self._now(session, session.request.keep_optimizer))
        session.break_off("the session was closed")

    def health(self) -> Health:
        """How many sessions there are."""
        return self._sessions.health()

    def request(self, session_id: str) -> SessionRequest | None:
        """What a session was opened with."""
        return self._sessions.request(session_id)

    def room_bytes(self, session: Session, most_bytes: int, most_of_opener: int | None) -> int:
        """How many bytes of weights may be pushed into a session, beside those of the others."""
        own, opener = session.pushed_bytes, session.request.opener
        room = most_bytes - self._sessions.held_bytes() + own
        if most_of_opener is None:
            return room
        return min(room, most_of_opener - self._sessions.held_bytes(opener=opener) + own)

    def find(self, session_id: str, token: str) -> Session:
        """The session. Raises SessionRefused when the id or the token is wrong."""
        return self._sessions.find(session_id, token)

    def run(self, session_id: str, token: str, upstream: Link) -> None:
        """Run a session's stage over one link until its END frame."""
        self.serve(self.claim(session_id, token), upstream)

    def claim(self, session_id: str, token: str) -> Session:
        """Reserve a session for one stream, which `serve` then runs."""
        session = self.find(session_id, token)
        with session.at_rest():
            self._part(session)
            session.begin()
        return session

    def serve(self, session: Session, upstream: Link) -> None:
        """Run a claimed session. When it fails it is gone or goes back; the error is raised."""
        session.links.append(upstream)
        try:
            with self._stage(session, upstream) as stage:
                stage.serve()
            session.count(stage.report())
        except BaseException as error:
            if session.saved is None:
                self._forget(session)
            else:
                session.go_back()
            upstream.close(str(error) or type(error).__name__)
            raise
        finally:
            session.end()

    def _part(self, session: Session) -> HostedPart:
        """The part, built from the snapshot after a failure or a restart."""
        if session.part is None and session.saved is not None:
            state = session.saved.state
            session.part = self._build_part(session.request, state.weights)
            session.optimizer = Optimizer(session.request.optimizer, session.part.parameters())
            load_slots(_module(session), session.optimizer, state.slots)
        if session.part is None:
            raise SessionRefused("the session has no weights yet: push them first")
        return session.part

    def _save(self, session: Session, first: Mapping[str, Tensor]) -> None:
        """Take a snapshot; `first` fills in what the part reads but does not report."""
        assert session.optimizer is not None
        state = state_of(_module(session), session.optimizer)
        state = replace(state, weights={**first, **state.weights})
        step, report = session.steps, session.report
        session.saved = Saved(step=step, state=state, report=report)
        if self._vault is not None:
            kept = Kept(request=session.request, step=step, state=state, report=report)
            self._vault.write(kept)

    def _forget(self, session: Session) -> None:
        self._sessions.forget(session)
        if self._vault is not None:
            self._vault.forget(session.request.session_id)

    @contextmanager
    def _stage(self, session: Session, upstream: Link) -> Iterator[LastStage | MiddleStage]:
        """The stage of a session, with its link downstream where there is one."""
        assert session.part is not None and session.optimizer is not None
        part, optimizer = _module(session), session.optimizer
        settings = _settings(session.request)
        if session.request.next_hop is None:
            yield LastStage(part, optimizer, settings, upstream=upstream)
            return
        if session.request.tx_power_w is not None:
            self._power.apply(session.request.tx_power_w)
        with self._connect(session.request.next_hop) as downstream:
            session.links.append(downstream)
            links = {"upstream": upstream, "downstream": downstream}
            yield MiddleStage(part, optimizer, settings, **links)


def _module(session: Session) -> nn.Module:
    return cast(nn.Module, session.part)


def _settings(request: SessionRequest) -> StageSettings:
    return StageSettings(
        name=request.name,
        schedule=request.schedule,
        depth=request.depth,
        deadline_s=request.deadline_s,
        idle_s=request.idle_s,
        recompute=request.recompute,
        precision=request.precision,
        keep_spans=request.keep_spans,
    )
