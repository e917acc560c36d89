"""Laws of weight streams: what goes in comes out; missing or misplaced pieces are noticed."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.pipeline.link import Frame, FrameKind
from collapipe_flwr.transport.weights import cut_weights, gather_weights

WEIGHTS = {
    "a.weight": torch.randn(5, 7),
    "a.bias": torch.randn(7).to(torch.bfloat16),
    "steps": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
}


@pytest.mark.parametrize("piece_bytes", [1, 8, 50, 10_000])
def test_round_trip_in_pieces(piece_bytes):
    back = gather_weights(cut_weights(WEIGHTS, piece_bytes), most_bytes=10_000)
    assert list(back) == list(WEIGHTS)
    for key, tensor in WEIGHTS.items():
        assert torch.equal(back[key], tensor)
        assert back[key].dtype == tensor.dtype


def broken_streams():
    frames = list(cut_weights(WEIGHTS, 50))
    yield "no end", frames[:-1]
    yield "piece missing", frames[:1] + frames[2:]
    yield "last piece missing", [f for f in frames if f is not frames[2]]
    yield "twice", [frames[0], *frames]
    yield "swapped", [frames[1], frames[0], *frames[2:]]
    yield "tensor missing", [f for f in frames if "steps" not in f.tensors]
    yield "other kind", [Frame(kind=FrameKind.GRADIENT), *frames]
    yield "no shape", [replace(frames[0], text="[["), *frames[1:]]
    yield "shape of strings", [replace(frames[0], text='[["5"]]'), *frames[1:]]
    yield "huge", [replace(frames[0], text="[[0, 1000000, 1000000, 1000000]]"), *frames[1:]]
    beyond = json.dumps([[0, *[2**39] * 3, 0]])
    yield "nothing, but of a size beyond torch", [replace(frames[0], text=beyond), *frames[1:]]
    yield "nothing", [Frame(kind=FrameKind.WEIGHTS, text="[]"), *frames]
    yield "no place", [replace(frames[0], text="[[]]"), *frames[1:]]
    yield "a place too many", [replace(frames[0], text="[[0, 5, 7], [0]]"), *frames[1:]]
    yield "negative", [replace(frames[0], text="[[0, -5, -7]]"), *frames[1:]]
    other = {"a.weight": frames[1].tensors["a.weight"].double()}
    yield "dtype changes", [frames[0], replace(frames[1], tensors=other), *frames[2:]]


@pytest.mark.parametrize("frames", [pytest.param(f, id=name) for name, f in broken_streams()])
def test_broken_streams_are_refused(frames):
    with pytest.raises(ProtocolError):
        gather_weights(iter(frames), most_bytes=10_000)


def test_small_tensors_share_frames():
    many = {str(index): torch.randn(3) for index in range(200)}
    frames = list(cut_weights(many))
    assert len(frames) < len(many) / 20
    assert all(torch.equal(many[key], found) for key, found in gather_weights(frames, 2400).items())


def calls_to_gather(tensors: int) -> int:
    """How many functions are called, in Python or C, for so many empty tensors."""
    frames = list(cut_weights({str(index): torch.empty(0) for index in range(tensors)}))
    calls = itertools.count()
    sys.setprofile(lambda _frame, event, _what: event.endswith("call") and next(calls))
    try:
        gather_weights(frames, most_bytes=1)
    finally:
        sys.setprofile(None)
    return next(calls)


def test_the_work_grows_no_faster_than_the_number_of_tensors():
    assert calls_to_gather(400) < 5 * calls_to_gather(100)


def test_more_tensors_than_any_model_has_are_refused_as_such(monkeypatch):
    monkeypatch.setattr("collapipe_flwr.transport.weights.MOST_TENSORS", 4)
    with pytest.raises(ProtocolError, match="more than 4 tensors"):
        gather_weights(cut_weights(WEIGHTS), most_bytes=10_000)
