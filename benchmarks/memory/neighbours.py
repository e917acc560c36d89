"""Devices of a control unit that answer from within its own process.

What they are given is dropped, and what they give back is random. All that the control unit itself
does with weights on their way is what it does in a deployment; only no bytes cross a network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collapipe_flwr.cluster.hosted import HostedEdge, RemoteStage, make_edge_request
from collapipe_flwr.cluster.order import TrainingOrder
from collapipe_flwr.cluster.remote import RemoteFleet
from collapipe_flwr.config.cluster_file import ClusterConfig, MemberConfig
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import NextHop, SessionKey
from collapipe_flwr.pipeline.link import (
    GRAD,
    HIDDEN,
    LEARNS,
    Frame,
    FrameKind,
    Link,
    MemoryLink,
    make_memory_pair,
)
from collapipe_flwr.transport.client import RemoteSession
from collapipe_flwr.transport.codec import decode_frame, encode_frame
from collapipe_flwr.transport.weights import cut_weights

WAIT_S = 600.0
ID = "memory"
_NOWHERE = "127.0.0.1:1"


@dataclass(frozen=True, slots=True)
class NearSession(RemoteSession):
    """A session whose calls end here."""

    def push_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Encode them as they would travel."""
        for frame in cut_weights(weights):
            encode_frame(frame)

    def ask_missing(self, digests: Mapping[str, str]) -> tuple[str, ...]:
        """All."""
        self.client.held[self.key] = tuple(digests)  # type: ignore[attr-defined]
        return tuple(digests)

    def ask_digests(self, *, with_optimizer: bool = False) -> dict[str, str]:
        """All weights have changed."""
        assert not with_optimizer
        return dict.fromkeys(self.client.held[self.key], "trained")  # type: ignore[attr-defined]

    def _fetch_frames(self, with_optimizer: bool, keys: tuple[str, ...] | None) -> Iterator[Frame]:
        assert keys and not with_optimizer
        shapes = self.client.splitter.shapes  # type: ignore[attr-defined]
        for key in keys:
            drawn = {key: torch.randn(shapes[key][0]).to(shapes[key][1])}
            frames = (decode_frame(encode_frame(frame)) for frame in cut_weights(drawn))
            yield from (frame for frame in frames if frame.kind is not FrameKind.END)
        yield Frame(kind=FrameKind.END, scalars={"tensors": float(len(keys))})

    def report(self) -> StageMeasurement:
        """Of nothing."""
        return StageMeasurement(name=self.key.session_id)

    def close(self, *, within_s: float | None = None) -> None:
        """Nothing is open."""

    def stream(self, *, name: str = "", config: LinkConfig | None = None) -> Link:
        """To a thread that plays all stages behind."""
        assert config is not None
        left, right = make_memory_pair(name, "device")
        client: NearClient = self.client  # type: ignore[assignment]
        answering_thread(lambda: answer(right, client.wait))
        return left


class NearClient:
    """Stands in for the client of one daemon."""

    silent = False

    def __init__(self, splitter: Splitter, wait: Callable[[], None] = lambda: None) -> None:
        """Answer hidden states as soon as ``wait`` returns."""
        self.splitter, self.wait = splitter, wait
        self.held: dict[SessionKey, tuple[str, ...]] = {}

    def open_session(self, request: object) -> None:
        """Nothing is opened."""

    def get_session(self, key: SessionKey) -> NearSession:
        """See `NearSession`."""
        return NearSession(self, key)  # type: ignore[arg-type]

    def attempt_patiently(self, call: Callable[[], Any]) -> Any:
        """Call it once."""
        return call()


@dataclass(frozen=True, slots=True, kw_only=True)
class NearEdge(HostedEdge):
    """An edge that `NearClient` stands in for."""

    @contextmanager
    def make_session(  # type: ignore[override]
        self, splitter: Splitter, order: TrainingOrder
    ) -> Iterator[tuple[RemoteStage, NextHop]]:
        """See `HostedEdge.make_session`."""
        request = make_edge_request(splitter, order)
        hosted = RemoteStage(NearClient(splitter), request)  # type: ignore[arg-type]
        yield hosted, NextHop(address=self.address, key=request.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEdge(HostedEdge):
    """The edge of a control unit that serves it itself.

    ``feed`` plays the last device, and calls a function after each step but its last. No stage is
    answered before, so that both ends of the pipeline work at the same time.
    """

    feed: Callable[[Link, Callable[[], None]], None]
    fed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def hold_targets(self, hosted: RemoteStage) -> None:
        """Run the session, which is open and filled; its targets come in frames."""

        def play() -> None:
            with hosted.session.connect(LinkConfig()) as link:
                self.feed(link, self.fed.release)
            self.fed.release()

        answering_thread(play)

    def await_step(self) -> None:
        """Return when the last device has done one more step; raises TimeoutError."""
        if not self.fed.acquire(timeout=WAIT_S):
            raise TimeoutError("the edge did not do its step")


@dataclass(frozen=True, slots=True, kw_only=True)
class NearFleet(RemoteFleet):
    """Devices that `NearClient` stands in for."""

    splitter: Splitter

    @staticmethod
    def of(splitter: Splitter, devices: int, edge: HostedEdge | None = None) -> NearFleet:
        """So many devices, and an ``edge``, else one near, too."""
        members = tuple(MemberConfig(name=f"d{n}", address=_NOWHERE) for n in range(devices))
        return NearFleet(
            splitter=splitter,
            cluster=ClusterConfig(
                id=ID,
                folder=Path(),
                control_unit=MemberConfig(name="control-unit"),
                devices=members,
                edge=MemberConfig(name="edge"),
                server=MemberConfig(name="server"),
            ),
            edges={"": edge or NearEdge(address=_NOWHERE)},
            deadline_s=WAIT_S,
        )

    @contextmanager
    def _make_client(self, hop: NextHop) -> Iterator[Any]:  # type: ignore[override]
        assert hop.name.startswith(ID)
        edge = self.edges[""]
        wait = edge.await_step if isinstance(edge, OwnEdge) else lambda: None
        yield NearClient(self.splitter, wait)


def answer(link: MemoryLink, wait: Callable[[], None] = lambda: None) -> None:
    """Play the stages behind: a random gradient for every hidden state, when ``wait`` returns."""
    while (frame := link.receive(deadline_s=WAIT_S)).kind is not FrameKind.END:
        if frame.kind is FrameKind.ACTIVATION:
            hidden = frame.tensors[HIDDEN]
            wanted = frame.scalars[LEARNS]
            wait()
            reply = Frame(
                kind=FrameKind.GRADIENT,
                step=frame.step,
                micro_batch=frame.micro_batch,
                tensors={GRAD: torch.randn_like(hidden) * 1e-3} if wanted else {},
                scalars={"loss": 1.0, "weight": frame.scalars["weight"]},
            )
            link.send(reply, deadline_s=WAIT_S)


def answering_thread(work: Callable[[], None]) -> threading.Thread:
    """Do it in a thread that ends with the process."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
