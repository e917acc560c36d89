"""Control messages come back as they were, and anything else is a ProtocolError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.measurements import Span, StageMeasurement
from collapipe_flwr.pipeline.config import (
    Execution,
    NextHop,
    Placement,
    SessionKey,
    SessionRequest,
    StageConfig,
)
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.transport.methods import MESSAGE_BYTES, decode_message, encode_message

REQUEST = SessionRequest(
    key=SessionKey(session_id="c1", token="t" * 32),
    spec_json='{"task": "seq2seq"}',
    stage=StageConfig(name="edge", depth=3, execution=Execution(clip_norm=0.5)),
    placement=Placement(
        blocks=(0, 2),
        next_hops=(
            NextHop(
                address="pi-2:1",
                key=SessionKey(session_id="c2", token="u" * 32),
                link=LinkConfig(codec="int8", forward_bit_per_s=1e6),
            ),
        ),
    ),
    optimizer=OptimizerConfig(name="sgd", momentum=0.9, betas=(0.1, 0.2)),
)

SPAN = Span(work="forward", step=1, micro_batch=2, start_s=0.5, stop_s=0.75)
REPORT = StageMeasurement(name="edge", steps=3, wait_s=0.5, spans=(SPAN, SPAN))


@pytest.mark.parametrize("message", [REQUEST, REPORT, StageMeasurement(name="edge")])
def test_round_trip(message):
    assert decode_message(type(message), encode_message(message)) == message


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(encode_message(REQUEST)), **fields}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"[" * 200_000,
        b" " * (MESSAGE_BYTES + 1),
        changed(stage={"name": "edge", "depth": "3"}),
        changed(stage={"name": "edge", "depth": True}),
        changed(stage={"name": "edge", "depth": 2.5}),
        changed(stage={"name": "edge", "deadline_s": float("nan")}),
        changed(stage={"name": "edge", "deadline_s": 10**400}),
        changed(stage={"name": "edge", "execution": {"precision": "fp8"}}),
        changed(stage={"depth": 3}),
        changed(key={"session_id": "c1", "token": None}),
        changed(key={"session_id": "c1", "token": "schlüssel" * 4}),
        changed(placement={"blocks": [0, 2]}),
        changed(placement={"blocks": [0, 2], "next_hops": []}),
        changed(extra=1),
        changed(optimizer={"name": "lion"}),
        changed(optimizer=[1, 2]),
        changed(optimizer={**json.loads(encode_message(OptimizerConfig())), "betas": [1]}),
        changed(optimizer={**json.loads(encode_message(OptimizerConfig())), "name": "lion"}),
    ],
)
def test_nonsense_is_refused(data):
    with pytest.raises(ProtocolError):
        decode_message(SessionRequest, data)


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(ProtocolError):
        decode_message(SessionRequest, data)
