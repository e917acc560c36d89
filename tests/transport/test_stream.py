"""What a stream holds of frames that nobody has taken yet."""

from __future__ import annotations

import pytest
import torch

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind, Mailbox
from collapipe_flwr.transport.codec import encode_frame
from collapipe_flwr.transport.stream import StreamLink


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_frames_that_wait_count_as_they_are_in_memory(monkeypatch, codec, dtype):
    counted, put = [], Mailbox.put

    def counting(box, item, deadline_s, *, size_bytes=0):
        counted.append(size_bytes)
        put(box, item, deadline_s, size_bytes=size_bytes)

    monkeypatch.setattr(Mailbox, "put", counting)
    hidden = torch.ones(64, 128, dtype=dtype)
    frame = Frame(kind=FrameKind.ACTIVATION, tensors={HIDDEN: hidden, "ids": torch.arange(9)})
    link = StreamLink("peer", lambda _: LinkError("gone"))
    data = encode_frame(frame, codec)
    link.feed([data])
    assert link.receive(deadline_s=1).tensors[HIDDEN].dtype is dtype
    assert counted == [max(hidden.nbytes + 9 * 8, len(data))]
    assert link.received.bytes == len(data)
