"""The fleet of devices on boards: a session on each daemon, connected hop by hop over gRPC.

The edge has the last of these sessions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import compress
from typing import TypeVar

from collapipe_flwr.cluster.fleet import OpenChain
from collapipe_flwr.cluster.hosted import HostedEdge, RemoteStage
from collapipe_flwr.cluster.order import CONTROL_UNIT, Segments, StageReplica, TrainingOrder
from collapipe_flwr.config.cluster_file import ClusterConfig, read_cluster
from collapipe_flwr.core.errors import (
    Blame,
    ConfigError,
    EdgeLost,
    LinkError,
    LinkTimeout,
    MemberFailed,
    PeerBroken,
    Unreachable,
)
from collapipe_flwr.core.links import Heartbeat, LinkConfig
from collapipe_flwr.core.schedule import ALONE, ReplicaIndex
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.pipeline.config import NextHop, Placement, SessionKey, SessionRequest
from collapipe_flwr.pipeline.link import Link, join_links
from collapipe_flwr.transport.client import HostClient

_log = logging.getLogger(__name__)
_MEGA = 1e6
PROBE_S = 2.0  # a device that does not answer within this time is lost
PATIENT_PROBE_S = 10.0  # the same, after no device has answered
AT_ONCE = 2  # devices that send their segments: each needs memory here, and may have a slow link
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Routes:
    """The connections of a chain; `places` are sessions by device, `links` those of the hops."""

    order: TrainingOrder
    places: Mapping[str, NextHop]
    edge: NextHop
    links: Sequence[LinkConfig]

    def list_next_hops(self, holder: StageReplica) -> tuple[NextHop, ...]:
        """Return the next stage's sessions, in the order of the holder's micro-batches."""
        link = self.links[holder.stage]
        if holder.stage == len(self.order.plan.segments):
            return (_set_lane(self.edge, link, holder, ALONE),)
        names = self.order.plan.segments[holder.stage].device_ids
        return tuple(
            _set_lane(
                self.places[names[other]],
                link,
                holder,
                ReplicaIndex(replica=other, replicas=len(names)),
            )
            for other in holder.turn.list_met(len(names))
        )

    def find_sibling(self, holder: StageReplica) -> NextHop | None:
        """Return the session of the replica before this one; the first has none."""
        if holder.turn.replica == 0:
            return None
        name = holder.segment.device_ids[holder.turn.replica - 1]
        return replace(self.places[name], link=LinkConfig(lanes=0))

    def make_request(self, splitter: AnySplitter, holder: StageReplica) -> SessionRequest:
        """Build the request that opens the session of one device."""
        order, segment = self.order, holder.segment
        return SessionRequest(
            key=self.places[holder.device_id].key,
            spec_json=splitter.spec.to_json(),
            stage=order.configure_stage(holder.stage, holder.turn),
            placement=Placement(
                blocks=(segment.first_block, segment.stop_block),
                next_hops=self.list_next_hops(holder),
                tx_power_w=order.plan.tx_power_w.get(holder.device_id),
                sibling=self.find_sibling(holder),
            ),
            optimizer=order.learning.optimizer,
            keep_optimizer=order.keep_optimizer,
            run_id=order.learning.run_id,
            server_round=order.server_round,
        )


def _set_lane(
    place: NextHop, link: LinkConfig, holder: StageReplica, receiver: ReplicaIndex
) -> NextHop:
    """Set the number of the holder's link among those that the receiver reads in turn."""
    senders = receiver.list_met(holder.turn.replicas)
    lane = senders.index(holder.turn.replica)
    return replace(place, link=replace(link, lane=lane, lanes=len(senders)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFleet:
    """A `Fleet` of the daemons in a cluster file.

    ``edges``, by their ids, may receive the last device's activations. The order configures links;
    a codec in the cluster file overrides that of the order, and the smaller of two rates counts.
    Calls end within ``deadline_s``; with a ``heartbeat`` every member also watches the next one,
    and the control unit watches all.
    """

    cluster: ClusterConfig
    edges: Mapping[str, HostedEdge]
    deadline_s: float = 20.0
    heartbeat: Heartbeat | None = None

    @contextmanager
    def open_chain(self, splitter: AnySplitter, order: TrainingOrder) -> Iterator[OpenChain]:
        """See `Fleet.open_chain`; every session is closed afterwards, as far as devices answer."""
        with ExitStack() as stack:
            limits = self.cluster.links
            rate_bit_per_s = limits.rate_mbit_per_s * _MEGA or None
            places = {name: self._make_hop(name) for name in order.plan.device_ids}
            last = self._find_edge(order.plan.edge)
            edge, hop = stack.enter_context(last.make_session(splitter, order))
            routes = _Routes(
                order,
                places,
                hop,
                [hop.with_limits(limits.codec, rate_bit_per_s) for hop in order.hops],
            )
            sessions = [
                RemoteStage(
                    stack.enter_context(self._make_client(places[holder.device_id])),
                    routes.make_request(splitter, holder),
                )
                for holder in order.holders
            ]
            stack.callback(_run_at_once, RemoteStage.close, tuple(sessions))
            sessions.append(edge)
            _run_at_once(lambda hosted: hosted.open(splitter, order), sessions)
            targets = last.hold_targets(edge)  # before its stage begins
            first_links = []
            for hosted in sessions[: order.plan.replicas[1]]:
                first_links.append(hosted.session.stream(name=CONTROL_UNIT, config=routes.links[0]))
                stack.callback(first_links[-1].close)
            link = join_links(first_links, ALONE)
            try:
                collect = partial(self.collect, link, sessions)
                yield OpenChain(link, collect, targets, routes.links)
            except BaseException as error:
                link.close(str(error) or type(error).__name__)
                raise

    def collect(
        self, link: Link, sessions: Sequence[RemoteStage], keep_optimizer: bool
    ) -> Segments:
        """See `OpenChain`; segments go to files as they arrive, `AT_ONCE` at a time."""
        link.close()  # returns when device 1, and with it the chain behind it, has ended
        turn = threading.BoundedSemaphore(AT_ONCE)
        parts = _run_at_once(lambda hosted: hosted.collect(keep_optimizer, turn), sessions)
        return reduce(Segments.__add__, parts)

    def find_missing(self, device_ids: Collection[str]) -> frozenset[str]:
        """See `Fleet.find_missing`; a device need not load its libraries to answer.

        Where none answers, this machine itself may have been delayed: all are asked once more, with
        a longer deadline.
        """
        cluster = self._read_cluster()
        listed = frozenset(map(cluster.device_id, cluster.devices)).intersection(device_ids)
        found = self._find_answering(listed, PROBE_S)
        if listed and not found:
            _log.warning("no device is there: asking all again")
            found = self._find_answering(listed, PATIENT_PROBE_S)
        return frozenset(device_ids) - found

    def _read_cluster(self) -> ClusterConfig:
        """Read the cluster from its file, as a device may be removed during a round.

        A file that cannot be read, because somebody edits it, must not end the round.
        """
        path = self.cluster.path
        if not self.cluster.version or path is None:
            return self.cluster
        try:
            return read_cluster(path)
        except ConfigError as error:
            _log.warning("the round goes on with the devices that it began with: %s", error)
            return self.cluster

    def _find_answering(self, device_ids: Collection[str], within_s: float) -> frozenset[str]:
        asked = replace(self, deadline_s=within_s, heartbeat=None)
        with ThreadPoolExecutor(max(len(device_ids), 1), thread_name_prefix="probe") as pool:
            return frozenset(compress(device_ids, pool.map(asked._is_answering, device_ids)))

    def _is_answering(self, device_id: str) -> bool:
        try:
            with self._make_client(self._make_hop(device_id)) as client:
                stopping = client.ask_status().stopping
        except LinkError as error:
            _log.warning("%s is lost: %s", device_id, error)
            return False
        if stopping:
            _log.warning("%s is lost: it is stopping", device_id)
        return not stopping

    def _find_edge(self, name: str) -> HostedEdge:
        """Look up the edge of a plan; raises EdgeLost if the cluster file does not list it."""
        if name not in self.edges:
            raise EdgeLost(
                f"the plan uses the edge {name!r}, which the cluster file does not list; it has "
                f"{', '.join(map(repr, self.edges))}"
            )
        return self.edges[name]

    def _make_client(self, hop: NextHop) -> HostClient:
        tls = self.cluster.tls_files(self.cluster.control_unit.name)
        return HostClient.from_hop(hop, tls, deadline_s=self.deadline_s)

    def _make_hop(self, device_id: str) -> NextHop:
        """Address a new session on a device; raises Unreachable if the file does not list it."""
        found = {self.cluster.device_id(member): member for member in self.cluster.devices}
        if device_id not in found:
            raise Unreachable(
                f"the plan uses device {device_id}, which the cluster file does not list; it has "
                f"{', '.join(sorted(found))}"
            )
        member = found[device_id]
        return NextHop(
            address=member.address,
            key=SessionKey.draw(device_id),
            name=device_id,
            certificate_name=self.cluster.certificate_name(member),
            heartbeat=self.heartbeat,
        )


def _run_at_once(
    work: Callable[[RemoteStage], Answer], sessions: Sequence[RemoteStage]
) -> list[Answer]:
    """Do the same with every session in parallel; raises the first one's error.

    The error blames a device that answers but fails or refuses.
    """

    def attributed(hosted: RemoteStage) -> Answer:
        try:
            return work(hosted)
        except (EdgeLost, LinkTimeout, MemberFailed, Unreachable):
            raise
        except LinkError as error:
            blame = Blame.RAISED if isinstance(error, PeerBroken) else Blame.UNREACHABLE
            raise MemberFailed(hosted.request.stage.name, str(error), blame) from error

    with ThreadPoolExecutor(len(sessions), thread_name_prefix="fleet") as pool:
        return list(pool.map(attributed, sessions))
