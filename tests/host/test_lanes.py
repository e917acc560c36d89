"""A session whose stage takes its work from several links: it begins when all of them are there."""

from __future__ import annotations

import pytest

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.schedule import ReplicaIndex
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.session import ONLY, SIBLING, Lane, Lanes, SessionRefused
from collapipe_flwr.pipeline.link import make_memory_pair
from collapipe_flwr.transport.client import HostClient
from tests.host.chain_to_edge import service, session_key
from tests.host.test_sessions import opened, told_to_end


def test_the_lanes_of_a_stage_claim_one_stream_and_each_of_them_once() -> None:
    edge = opened(service())
    stream = edge.claim(session_key(), Lane(1, 2))
    for refused in (Lane(1, 2), Lane(0, 3), Lane(2, 2), SIBLING, ONLY):
        with pytest.raises(SessionRefused, match="in the middle of a stream"):
            edge.claim(session_key(), refused)
    assert edge.claim(session_key(), Lane(0, 2)) is stream
    assert not stream.session.enter(stream, Lane(0, 2), told_to_end())
    assert stream.session.enter(stream, Lane(1, 2), told_to_end())
    edge.serve(stream, stream.lanes.upstream)
    assert edge.measure_load().running == 0
    assert edge.report(session_key()).steps == 0


def test_a_lane_that_goes_takes_those_that_wait_with_it() -> None:
    edge = opened(service())
    stream = edge.claim(session_key(), Lane(0, 2))
    ours, theirs = make_memory_pair("edge", "device")
    stream.session.enter(stream, Lane(0, 2), ours)
    edge.release(stream, "another link of this stage broke off")
    with pytest.raises(LinkError, match="another link of this stage broke off"):
        theirs.receive(deadline_s=1)
    edge.serve(edge.claim(session_key()), told_to_end())


def test_a_stage_without_replicas_has_no_lane_from_a_sibling() -> None:
    edge = opened(service())
    with pytest.raises(SessionRefused, match="no lane 0 of 0"):
        edge.claim(session_key(), SIBLING)
    edge.serve(edge.claim(session_key()), told_to_end())


def test_every_replica_but_the_last_waits_for_the_next_one() -> None:
    for replica, waits in ((0, True), (1, True), (2, False)):
        lanes = Lanes(ReplicaIndex(replica=replica, replicas=3))
        lanes.links[ONLY] = told_to_end()
        assert lanes.complete is not waits
        assert lanes.accepts(SIBLING) is waits
        if waits:
            lanes.links[SIBLING] = told_to_end()
            assert lanes.complete


def test_over_the_wire_a_lane_that_breaks_off_is_heard_by_the_other() -> None:
    with HostServer("127.0.0.1:0", opened(service())) as host, HostClient(host.address) as client:
        session = client.get_session(session_key())
        first = session.stream(config=LinkConfig(lane=0, lanes=2))
        with pytest.raises(LinkError, match="in the middle of a stream"):
            session.stream(config=LinkConfig(lane=0, lanes=2))
        second = session.stream(config=LinkConfig(lane=1, lanes=2), name="the other")
        second.close("power cut")
        with pytest.raises(LinkError, match="another link of this stage broke off"):
            first.receive(deadline_s=20)
        first.close()


def test_over_the_wire_a_lane_that_waits_alone_ends_with_its_stream() -> None:
    with HostServer("127.0.0.1:0", opened(service())) as host, HostClient(host.address) as client:
        session = client.get_session(session_key())
        alone = session.stream(config=LinkConfig(lane=0, lanes=2))
        alone.close("gave up")
        again = session.stream(config=LinkConfig(lane=0, lanes=2))
        again.close("gave up")
