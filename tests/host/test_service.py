"""Laws of sessions: tokens, limits, one stream at a time, and the end after a failure."""

from __future__ import annotations

import threading

import pytest
import torch

from collapipe_flwr.core.errors import LinkError, ScheduleError
from collapipe_flwr.host.ledger import Ledger
from collapipe_flwr.host.service import HostService
from collapipe_flwr.host.session import SessionRefused
from collapipe_flwr.pipeline.config import SessionKey
from collapipe_flwr.pipeline.link import Frame, FrameKind, make_memory_pair
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from tests.host.chain_to_edge import TOKEN, build_head, request, service, session_key
from tests.pipeline.chains import Head


def test_a_session_lives_from_open_to_close():
    edge, head = service(), Head()
    edge.open(request())
    edge.push_weights(session_key(), head.state_dict())
    assert edge.measure_load().sessions == 1
    back = edge.copy_weights(session_key())
    assert all(torch.equal(back[k], t) for k, t in head.state_dict().items())
    edge.close(session_key())
    assert edge.measure_load().sessions == 0


def test_weights_are_copies():
    edge, head = service(), Head()
    edge.open(request())
    edge.push_weights(session_key(), head.state_dict())
    edge.copy_weights(session_key())["out.weight"].zero_()
    assert edge.copy_weights(session_key())["out.weight"].abs().sum() > 0


@pytest.mark.parametrize(
    ("session_id", "token"), [("c2", TOKEN), ("c1", "wrong"), ("c1", "é"), ("", "")]
)
def test_a_stranger_is_refused_everywhere(session_id, token):
    edge = service()
    edge.open(request())
    _, link = make_memory_pair("a", "b")
    key = SessionKey(session_id=session_id, token=token)
    for call in (
        lambda: edge.push_weights(key, {}),
        lambda: edge.copy_weights(key),
        lambda: edge.report(key),
        lambda: edge.close(key),
        lambda: edge.run(key, link),
    ):
        with pytest.raises(SessionRefused, match="no session"):
            call()
    assert edge.measure_load().sessions == 1


def test_limits_and_bad_requests():
    edge = service(most_sessions=1)
    with pytest.raises(SessionRefused, match="16 characters"):
        edge.open(request(token="short"))
    with pytest.raises(ScheduleError, match="pipedream"):
        edge.open(request(schedule="pipedream"))
    edge.open(request())
    with pytest.raises(SessionRefused, match="open already"):
        edge.open(request())
    with pytest.raises(SessionRefused, match="1 sessions, its limit"):
        edge.open(request("c2"))


def test_a_full_edge_drops_sessions_that_nobody_uses_any_more():
    now_s = 0.0
    edge = HostService(build_head, most_sessions=2, forget_after_s=100.0, clock=lambda: now_s)
    edge.open(request("old"))
    edge.open(request("used"))
    now_s = 90.0
    edge.push_weights(session_key("used"), Head().state_dict())
    now_s = 99.0
    with pytest.raises(SessionRefused, match="its limit"):
        edge.open(request("new"))
    now_s = 101.0
    edge.open(request("new"))
    edge.copy_weights(session_key("used"))
    with pytest.raises(SessionRefused, match="no session old"):
        edge.copy_weights(session_key("old"))


def test_a_part_left_over_by_a_control_unit_that_died_makes_room_for_its_next_one():
    mine = {"cluster_id": "g", "run_id": "r", "optimizer": OptimizerConfig(name="adamw")}
    first = service()
    first.open(request("old", **mine))
    first.push_weights(session_key("old"), Head().state_dict())
    edge = service(ledger=Ledger(first.measure_load().held_bytes))
    for session_id in ("old", "new"):
        edge.open(request(session_id, server_round=1, **mine))
        edge.push_weights(session_key(session_id), Head().state_dict())
    assert edge.measure_load().sessions == 1
    with pytest.raises(SessionRefused, match="no session old"):
        edge.copy_weights(session_key("old"))


@pytest.mark.parametrize(
    "other",
    [
        {"cluster_id": "w"},
        {"cluster_id": ""},
        {"run_id": "another"},
        {"opener": "laptop"},
        {"name": "stage 1"},
        {"blocks": (0, 1)},
    ],
)
def test_only_its_own_part_makes_room_for_a_stage(other):
    mine = {"cluster_id": "g", "run_id": "r", "opener": "cu"}
    edge = service()
    edge.open(request("old", **mine))
    edge.open(request("new", **{**mine, **other}))
    assert edge.measure_load().sessions == 2


def test_a_part_in_use_stays_beside_the_next_one():
    edge = service()
    edge.open(request("old", cluster_id="g"))
    edge.push_weights(session_key("old"), Head().state_dict())
    edge.claim(session_key("old"))
    edge.open(request("new", cluster_id="g"))
    assert edge.measure_load().sessions == 2


def test_a_host_is_at_work_while_its_sessions_are_used_and_not_by_those_that_were_left():
    now_s = 0.0
    edge = HostService(build_head, clock=lambda: now_s)
    assert not edge.is_at_work()
    edge.open(request("left"))
    assert edge.is_at_work()
    now_s = 3600.0
    assert not edge.is_at_work()
    edge.push_weights(session_key("left"), Head().state_dict())
    assert edge.is_at_work()
    edge.close(session_key("left"))
    assert not edge.is_at_work()


def test_running_needs_weights_and_reporting_needs_a_run():
    edge = service()
    edge.open(request())
    with pytest.raises(SessionRefused, match="push them first"):
        edge.run(session_key(), make_memory_pair("a", "b")[0])
    with pytest.raises(SessionRefused, match="not run yet"):
        edge.report(session_key())


def test_one_stream_at_a_time_and_an_orderly_end_keeps_the_session():
    edge = service()
    edge.open(request())
    edge.push_weights(session_key(), Head().state_dict())
    session = edge.claim(session_key())
    with pytest.raises(SessionRefused, match="middle of a stream"):
        edge.claim(session_key())
    with pytest.raises(SessionRefused, match="middle of a stream"):
        edge.copy_weights(session_key())
    ours, theirs = make_memory_pair("edge", "device")
    worker = threading.Thread(target=edge.serve, args=(session, ours))
    worker.start()
    theirs.send(Frame(kind=FrameKind.END), deadline_s=1)
    worker.join(10)
    assert edge.report(session_key()).steps == 0
    assert edge.measure_load().running == 0


def test_a_failed_stream_takes_its_session_with_it():
    edge = service()
    edge.open(request())
    edge.push_weights(session_key(), Head().state_dict())
    ours, theirs = make_memory_pair("edge", "device")
    theirs.close("lost power")
    with pytest.raises(LinkError, match="device failed: lost power"):
        edge.run(session_key(), ours)
    assert edge.measure_load().sessions == 0
