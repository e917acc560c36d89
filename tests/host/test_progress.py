"""What a host tells of its work: a session's report, and how far every cluster's round is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.host.service import HostService
from collapipe_flwr.pipeline.config import PassesDone
from collapipe_flwr.pipeline.link import make_memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage
from tests.host.chain_to_edge import request, service, session_key
from tests.pipeline.chains import SGD, make_batch, make_parts, settings

BATCH = make_batch((2, 2))  # two micro-batches


@pytest.fixture
def edge() -> HostService:
    return service()


def opened(edge: HostService, session_id: str = "c1", **options: object) -> None:
    edge.open(request(session_id, **{"cluster_id": "g", "attempt": 1, **options}))
    edge.push_weights(session_key(session_id), make_parts((1,))[-1].state_dict())


@contextmanager
def streaming(edge: HostService, session_id: str = "c1", first_step: int = 0) -> Iterator:
    """The control unit at the other end of a stream, which an error in the body breaks."""
    ours, theirs = make_memory_pair("control unit", "edge")

    def serve() -> None:
        with suppress(LinkError):
            edge.run(session_key(session_id), theirs)

    thread = threading.Thread(target=serve)
    thread.start()
    config, optimizer = settings("control unit"), Optimizer(SGD, [])
    first = FirstStage(
        make_parts((1,))[0], optimizer, config, downstream=ours, first_step=first_step
    )
    try:
        yield first
        first.finish()
    except BaseException:
        ours.close("lost power")
        raise
    finally:
        thread.join(60)
        assert not thread.is_alive()


def train(edge: HostService, steps: Sequence[int], session_id: str = "c1") -> None:
    with streaming(edge, session_id, steps[0]) as first:
        for _ in steps:
            first.train_step(BATCH)


def trained(edge: HostService, attempt: int = 1) -> dict[str, int]:
    return {
        name: done.trained
        for name, done in edge.sessions.count_passes().items()
        if done.attempt == attempt
    }


def test_a_report_adds_up_the_streams_of_a_session(edge: HostService) -> None:
    opened(edge, "whole", cluster_id="w", keep_spans=True)
    opened(edge, "parts", keep_spans=True)
    train(edge, range(4), "whole")
    train(edge, range(1), "parts")
    train(edge, range(1, 4), "parts")
    whole, parts = (edge.report(session_key(each)) for each in ("whole", "parts"))
    assert (parts.steps, parts.micro_batches) == (4, 8)
    assert parts.received_up.bytes == whole.received_up.bytes
    works = [[(s.work, s.step, s.micro_batch) for s in r.spans] for r in (whole, parts)]
    assert [w for w in works[0] if w[0] == "forward"] == [w for w in works[1] if w[0] == "forward"]


def test_new_weights_begin_a_new_report(edge: HostService) -> None:
    opened(edge)
    train(edge, range(1))
    edge.push_weights(session_key(), edge.copy_weights(session_key()))
    train(edge, range(3))
    assert edge.report(session_key()).steps == 3


def test_micro_batches_count_while_a_session_runs_and_once_it_is_closed(edge: HostService) -> None:
    opened(edge)
    assert trained(edge) == {"g": 0}
    with streaming(edge) as first:
        first.train_step(BATCH)
        assert trained(edge) == {"g": 2}
        first.train_step(BATCH)
        assert trained(edge) == {"g": 4}
    assert trained(edge) == {"g": 4}
    edge.close(session_key())
    assert trained(edge) == {"g": 4}


def test_the_sessions_of_one_round_add_up_and_the_next_round_begins_at_nothing(
    edge: HostService,
) -> None:
    for session_id in ("interval 1", "interval 2"):
        opened(edge, session_id)
        train(edge, range(1), session_id)
        edge.close(session_key(session_id))
    assert (trained(edge), trained(edge, 2)) == ({"g": 4}, {})
    opened(edge, "next", attempt=2)
    assert (trained(edge), trained(edge, 2)) == ({}, {"g": 0})
    opened(edge, "other", cluster_id="w", attempt=2)
    train(edge, range(1), "other")
    assert trained(edge, 2) == {"g": 0, "w": 2}


def test_a_stream_that_broke_does_not_count(edge: HostService) -> None:
    opened(edge, "void")
    with pytest.raises(ZeroDivisionError), streaming(edge, "void") as first:
        first.train_step(BATCH)
        raise ZeroDivisionError
    assert trained(edge) == {"g": 0}
    opened(edge, "replay")
    train(edge, range(1), "replay")
    assert trained(edge) == {"g": 2}


def test_another_run_begins_at_nothing(edge: HostService) -> None:
    opened(edge)
    train(edge, range(1))
    edge.close(session_key())
    opened(edge, "again", attempt=7)
    assert trained(edge, 7) == {"g": 0}


def test_only_the_last_stage_of_a_round_counts(edge: HostService) -> None:
    opened(edge, "segment", blocks=(0, 1))
    opened(edge, "texts", attempt=0)
    assert edge.sessions.count_passes() == {}
    opened(edge)
    assert edge.sessions.count_passes() == {"g": PassesDone(attempt=1)}
