"""A coded link in memory delivers what a stream with the same codec would."""

from __future__ import annotations

import pytest
import torch

from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame, FrameKind
from collapipe_flwr.transport.codec import WIRE_CODECS, decode_frame, encode_frame
from collapipe_flwr.transport.simulated_link import make_simulated_pair


@pytest.mark.parametrize("codec", WIRE_CODECS)
@pytest.mark.parametrize("name", [HIDDEN, GRAD])
def test_it_loses_what_the_wire_loses(codec, name):
    tensors = {name: torch.randn(3, 5, 256), "labels": torch.arange(7), "scale": torch.randn(9)}
    frame = Frame(kind=FrameKind.ACTIVATION, tensors=tensors, scalars={"weight": 3.0})
    left, right = make_simulated_pair("left", "right", LinkConfig(codec=codec))
    left.send(frame, deadline_s=1.0)
    here, there = right.receive(deadline_s=1.0), decode_frame(encode_frame(frame, codec))
    assert here.scalars == there.scalars
    for key, tensor in there.tensors.items():
        assert torch.equal(here.tensors[key], tensor)
    exact_bytes = 4 * 9 + 8 * 7
    assert left.sent.bytes == len(WIRE_CODECS[codec].pack(tensors[name])) + exact_bytes
    assert right.received.bytes == left.sent.bytes
    assert torch.equal(frame.tensors[name], tensors[name])  # what was sent is not touched
