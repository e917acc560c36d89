"""Codecs on links that move no bytes: a simulated cluster loses what a real one would lose."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.pipeline.frame import GRAD, HIDDEN, Frame
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.transport.quantize import WIRE_CODECS, WireCodec


class SimulatedCodecLink:
    """A link whose sender writes hidden states and gradients as ``codec`` would, and reads back.

    What it sent is counted as it would be on a wire, without the headers.
    """

    def __init__(self, link: Link, codec: str) -> None:
        self._link = link
        self._codec: WireCodec = WIRE_CODECS[codec]
        self._saved_bytes = 0

    @property
    def peer(self) -> str:
        """See `Link.peer`."""
        return self._link.peer

    @property
    def sent(self) -> LinkTraffic:
        """See `Link.sent`."""
        sent = self._link.sent
        return replace(sent, bytes=sent.bytes - self._saved_bytes)

    @property
    def received(self) -> LinkTraffic:
        """See `Link.received`; it is coded by the other end."""
        return self._link.received

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        """See `Link.send`."""
        tensors = {name: self._written(name, t) for name, t in frame.tensors.items()}
        self._link.send(replace(frame, tensors=tensors), deadline_s=deadline_s)

    def receive(self, *, deadline_s: float) -> Frame:
        """See `Link.receive`."""
        return self._link.receive(deadline_s=deadline_s)

    def close(self, error: str = "") -> None:
        """See `Link.close`."""
        self._link.close(error)

    def _written(self, name: str, tensor: Tensor) -> Tensor:
        if name not in (HIDDEN, GRAD) or not tensor.is_floating_point():
            return tensor
        raw = bytearray(self._codec.pack(tensor.detach()))
        self._saved_bytes += tensor.numel() * tensor.element_size() - len(raw)
        return self._codec.unpack(raw, tensor.dtype).reshape(tensor.shape)


def coded(link: Link, codec: str) -> Link:
    """The link itself where the codec is exact."""
    return link if codec == "fp32" else SimulatedCodecLink(link, codec)
