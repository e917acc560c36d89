"""Devices on boards: a session on each one's daemon, joined hop by hop over gRPC."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TypeVar

from torch import Tensor

from collapipe_flwr.cluster.fleet import Holder, RoundOrder, Segments
from collapipe_flwr.cluster.wires import CONTROL_UNIT
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig, read_cluster
from collapipe_flwr.core.errors import (
    Blame,
    FrozenWanted,
    LinkError,
    LinkTimeout,
    MemberFailed,
    PeerBroken,
    Unreachable,
)
from collapipe_flwr.core.links import Heartbeat, LinkConfig
from collapipe_flwr.core.turns import ALONE, Turn
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.config import NextHop, Placement, SessionKey, SessionRequest
from collapipe_flwr.pipeline.fan import fan_of
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.state import PartState
from collapipe_flwr.pipeline.stowed import Lookup
from collapipe_flwr.transport.client import EdgeClient, Session
from collapipe_flwr.transport.weights import TransferStats

_log = logging.getLogger(__name__)
_MEGA = 1e6
PROBE_S = 2.0  # a device that does not answer within this time is lost
PATIENT_PROBE_S = 10.0  # unless no other does
CLOSE_S = 2.0  # for a device to free a session
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFleet:
    """A `Fleet` of the daemons in a cluster file.

    ``edge`` is the session that the last device passes its activations to. Links behave as the
    order says; a codec in the cluster file stands above it, and of two rates the smaller holds.
    Calls end within ``deadline_s``, transfers of weights within ``transfer_s``; with a
    ``heartbeat`` every member also watches the one behind it, and this side watches all.
    """

    cluster: ClusterConfig
    edge: NextHop
    deadline_s: float = 20.0
    transfer_s: float = 600.0
    heartbeat: Heartbeat | None = None

    @contextmanager
    def chain(self, splitter: AnySplitter, order: RoundOrder) -> Iterator[RemoteChain]:
        """See `Fleet.chain`; every session is closed afterwards, as far as devices answer."""
        with ExitStack() as stack:
            places = {name: self._hop(name) for name in order.plan.device_ids}
            links = [self._limited(hop) for hop in order.hops]
            edge = replace(self.edge, heartbeat=self.heartbeat)
            routes = Routes(order, places, edge, links)
            sessions = [
                Hosted(
                    stack.enter_context(self._client(holder.device_id)),
                    _request(splitter, order, holder, routes),
                )
                for holder in order.holders
            ]
            stack.callback(_at_once, Hosted.close, sessions)
            _at_once(lambda hosted: hosted.open(splitter, order), sessions)
            first = sessions[: order.plan.replicas[1]]
            joined = []
            for hosted in first:
                joined.append(hosted.session.stream(name=CONTROL_UNIT, config=links[0]))
                stack.callback(joined[-1].close)
            link = fan_of(joined, ALONE)
            try:
                yield RemoteChain(link, sessions)
            except BaseException as error:
                link.close(str(error) or type(error).__name__)
                raise

    def missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """See `Fleet.missing`; a device need not load its libraries to answer.

        Where none answers, this machine may be the one that was held up: all are asked once more,
        with patience.
        """
        listed = self._listed_now().intersection(device_ids)
        found = self._answering(listed, PROBE_S)
        if listed and not found:
            _log.warning("no device is there: asking all again")
            found = self._answering(listed, PATIENT_PROBE_S)
        return frozenset(device_ids) - found

    def _answering(self, device_ids: Collection[str], within_s: float) -> frozenset[str]:
        """Those that answer."""
        asked = replace(self, deadline_s=within_s, heartbeat=None)
        with ThreadPoolExecutor(max(len(device_ids), 1), thread_name_prefix="probe") as pool:
            return frozenset(compress(device_ids, pool.map(asked._answers, device_ids)))

    def _listed_now(self) -> frozenset[str]:
        """The devices of the cluster file as it is now: one may be removed within a round."""
        path = self.cluster.path
        cluster = read_cluster(path) if self.cluster.version and path else self.cluster
        return frozenset(map(cluster.device_id, cluster.devices))

    def _answers(self, device_id: str) -> bool:
        try:
            with self._client(device_id) as client:
                stopping = client.status().stopping
        except LinkError as error:
            _log.warning("%s is lost: %s", device_id, error)
            return False
        if stopping:
            _log.warning("%s is lost: it is stopping", device_id)
        return not stopping

    def _client(self, device_id: str) -> EdgeClient:
        member = self._member(device_id)
        return EdgeClient(
            member.address,
            what=device_id,
            tls=self.cluster.tls_files(self.cluster.control_unit.name),
            certificate_name=self.cluster.certificate_name(member),
            deadline_s=self.deadline_s,
            transfer_s=self.transfer_s,
            heartbeat=self.heartbeat,
        )

    def _hop(self, device_id: str) -> NextHop:
        """A fresh session on a device."""
        member = self._member(device_id)
        return NextHop(
            address=member.address,
            key=SessionKey.random(device_id),
            name=device_id,
            certificate_name=self.cluster.certificate_name(member),
            heartbeat=self.heartbeat,
        )

    def _limited(self, planned: LinkConfig) -> LinkConfig:
        """A planned link within the limits of the cluster file."""
        links = self.cluster.links
        return planned.limited(links.codec, links.rate_mbit_per_s * _MEGA or None)

    def _member(self, device_id: str) -> MemberConfig:
        found = {self.cluster.device_id(member): member for member in self.cluster.devices}
        if device_id not in found:
            raise Unreachable(
                f"the plan uses device {device_id}, which the cluster file does not list; it has "
                f"{', '.join(sorted(found))}"
            )
        return found[device_id]


@dataclass(frozen=True, slots=True)
class Routes:
    """Whom every device dials: `places` are the sessions by device, `links` those of the hops."""

    order: RoundOrder
    places: Mapping[str, NextHop]
    edge: NextHop
    links: Sequence[LinkConfig]

    def down(self, holder: Holder) -> list[NextHop]:
        """The next stage's sessions, in the order in which the holder's micro-batches take them."""
        link = self.links[holder.stage]
        if holder.stage == len(self.order.plan.segments):
            return [_lane(self.edge, link, holder, ALONE)]
        names = self.order.plan.segments[holder.stage].device_ids
        return [
            _lane(self.places[names[other]], link, holder, Turn(replica=other, replicas=len(names)))
            for other in holder.turn.meets(len(names))
        ]

    def ahead(self, holder: Holder) -> NextHop | None:
        """The session of the replica before this one; the first has none."""
        if holder.turn.replica == 0:
            return None
        name = holder.segment.device_ids[holder.turn.replica - 1]
        return replace(self.places[name], link=LinkConfig(lanes=0))


@dataclass(frozen=True, slots=True)
class Hosted:
    """One segment on one daemon."""

    client: EdgeClient
    request: SessionRequest
    pushed: list[Mapping[str, Tensor]] = field(default_factory=list)
    moved: list[TransferStats] = field(default_factory=list)

    @property
    def session(self) -> Session:
        """How the daemon is asked for it."""
        return self.client.session(self.request.key)

    def open(self, splitter: AnySplitter, order: RoundOrder) -> None:
        """Make the session and give it its weights."""
        assert self.request.placement is not None
        blocks = self.request.placement.blocks
        keys = (*splitter.segment_keys(*blocks), *splitter.shared_keys)
        self.client.open_session(self.request)
        state = PartState(weights=order.weights, optimizer=order.slots).only(keys)
        tensors = state.tensors()
        self.pushed.append(tensors)
        try:
            self.moved.append(self.session.push_missing(tensors))
        except FrozenWanted as wanted:
            _log.info("%s; it gets its frozen weights from here", wanted)
            frozen = splitter.resident_keys_of_segment(*blocks)
            whole = Lookup.of(tensors, splitter.read_resident(frozen))
            self.moved.append(self.session.push_missing(whole))

    def collect(self, keep_optimizer: bool, turn: AbstractContextManager[object]) -> Segments:
        """The segment and its report; replicas but the first, which are equal, report only.

        Weights travel within ``turn``.
        """
        report = self.session.report()
        if self.request.stage.turn.replica:
            moved = sum(self.moved, TransferStats())
            return Segments(state=PartState(weights={}), reports=(report,), moved=moved)
        tensors, moved = self.session.fetch_changed(
            self.pushed[0], with_optimizer=keep_optimizer, turn=turn
        )
        self.moved.append(moved)
        state = PartState.of_tensors(tensors)
        return Segments(state=state, reports=(report,), moved=sum(self.moved, TransferStats()))

    def close(self) -> None:
        """Free the session; a device that is gone, or dropped it already, is logged.

        One that fell silent frees it by itself when it is back.
        """
        if self.client.silent:
            return
        try:
            self.session.close(within_s=CLOSE_S)
        except LinkError as error:
            _log.info("nothing to close: %s", error)


class RemoteChain:
    """Sessions on daemons; see `Chain`."""

    def __init__(self, link: Link, sessions: Sequence[Hosted]) -> None:
        self.link = link
        self._sessions = sessions

    def collect(self, *, keep_optimizer: Callable[[], bool] = lambda: False) -> Segments:
        """See `Chain.collect`."""
        self.link.close()  # returns when device 1, and with it the chain behind it, has ended
        slots = keep_optimizer()
        turn = threading.Lock()  # segment by segment: each passes through this machine's memory
        parts = _at_once(lambda hosted: hosted.collect(slots, turn), self._sessions)
        return Segments(
            state=PartState(
                weights=Lookup.of(*(part.state.weights for part in parts)),
                optimizer=Lookup.of(*(part.state.optimizer for part in parts)),
            ),
            reports=tuple(report for part in parts for report in part.reports),
            moved=sum((part.moved for part in parts), TransferStats()),
        )


def _request(
    splitter: AnySplitter, order: RoundOrder, holder: Holder, routes: Routes
) -> SessionRequest:
    """The session of one device."""
    segment = holder.segment
    next_hop, *more_hops = routes.down(holder)
    return SessionRequest(
        key=routes.places[holder.device_id].key,
        spec_json=splitter.spec.to_json(),
        stage=order.settings(holder.stage, holder.turn),
        placement=Placement(
            blocks=(segment.first_block, segment.stop_block),
            next_hop=next_hop,
            tx_power_w=order.plan.tx_power_w.get(holder.device_id),
            more_hops=tuple(more_hops),
            sibling=routes.ahead(holder),
        ),
        optimizer=order.learning.optimizer,
        keep_optimizer=order.keep_optimizer,
        run_id=order.learning.run_id,
        server_round=order.server_round,
    )


def _lane(place: NextHop, link: LinkConfig, holder: Holder, receiver: Turn) -> NextHop:
    lane, lanes = holder.lane_to(receiver)
    return replace(place, link=replace(link, lane=lane, lanes=lanes))


def _at_once(work: Callable[[Hosted], Answer], sessions: Sequence[Hosted]) -> list[Answer]:
    """Do the same with every session side by side; raises the first one's error."""

    def attributed(hosted: Hosted) -> Answer:
        with _blaming(hosted.request.stage.name):
            return work(hosted)

    with ThreadPoolExecutor(len(sessions), thread_name_prefix="fleet") as pool:
        return list(pool.map(attributed, sessions))


@contextmanager
def _blaming(device_id: str) -> Iterator[None]:
    """Blame a device that answers but fails, or refuses, while it is given or asked something."""
    try:
        yield
    except (LinkTimeout, MemberFailed, Unreachable):
        raise
    except LinkError as error:
        broken = isinstance(error, PeerBroken)
        blame = Blame.RAISED if broken else Blame.UNREACHABLE
        raise MemberFailed(device_id, str(error), blame) from error
