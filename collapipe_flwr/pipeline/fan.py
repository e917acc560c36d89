"""One `Link` to all replicas of a neighbouring stage, so that a stage need not know of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import reduce

from collapipe_flwr.core.errors import LinkError, ProtocolError
from collapipe_flwr.core.links import LinkTraffic
from collapipe_flwr.core.turns import Turn
from collapipe_flwr.pipeline.link import Frame, FrameKind, Link

_OF_MICRO_BATCHES = (FrameKind.ACTIVATION, FrameKind.GRADIENT)


class Fan:
    """Links in the order in which the micro-batches of `turn` take them.

    Frames of micro-batches alternate; all others are sent to each replica, and come from each.
    """

    def __init__(self, links: Sequence[Link], turn: Turn) -> None:
        self.peer = " and ".join(link.peer for link in links)
        self._links = tuple(links)
        self._turn = turn

    @property
    def sent(self) -> LinkTraffic:
        """See `Link.sent`; of all together."""
        return reduce(LinkTraffic.__add__, (link.sent for link in self._links))

    @property
    def received(self) -> LinkTraffic:
        """See `Link.received`; of all together."""
        return reduce(LinkTraffic.__add__, (link.received for link in self._links))

    def of(self, micro_batch: int) -> Link:
        """The link that a micro-batch takes."""
        return self._links[self._turn.lane(micro_batch, len(self._links))]

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        if frame.kind in _OF_MICRO_BATCHES:
            self.of(frame.micro_batch).send(frame, deadline_s=deadline_s)
            return
        for link in self._links:
            link.send(frame, deadline_s=deadline_s)

    def receive(self, *, deadline_s: float) -> Frame:
        """What every replica says. Raises ProtocolError where they do not say the same."""
        until_s = time.monotonic() + deadline_s
        first, *others = (
            link.receive(deadline_s=max(until_s - time.monotonic(), 0.0)) for link in self._links
        )
        for link, frame in zip(self._links[1:], others, strict=True):
            if (frame.kind, frame.step) != (first.kind, first.step):
                raise ProtocolError(
                    f"{link.peer} sent {frame.kind.name} of step {frame.step}, but "
                    f"{self._links[0].peer} {first.kind.name} of step {first.step}"
                )
        return first

    def close(self, error: str | LinkError = "") -> None:
        for link in self._links:
            link.close(error)


def fan_of(links: Sequence[Link], turn: Turn) -> Link:
    """The links as one; a single one as it is."""
    return links[0] if len(links) == 1 else Fan(links, turn)


def lane_of(link: Link, kind: FrameKind, micro_batch: int) -> Link:
    """The link that brings this frame."""
    if kind in _OF_MICRO_BATCHES and isinstance(link, Fan):
        return link.of(micro_batch)
    return link
