"""What moving bytes costs: CPU seconds of both ends per gigabyte of activations, plain and TLS.

The sending end is this process, the receiving one a process of its own that decodes every frame
and throws it away.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.data_plane.crew import Crew
from benchmarks.data_plane.duel import Pace, open_chain
from benchmarks.data_plane.job import Job
from benchmarks.data_plane.network import Network
from collapipe_flwr.core.links import LinkConfig, TlsFiles
from collapipe_flwr.host.service import HostService
from collapipe_flwr.host.session import ONLY, Lane, SessionStream
from collapipe_flwr.pipeline.config import SessionKey, SessionRequest
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind, Link
from collapipe_flwr.transport.client import HostClient

SINK = "sink"
_TOKEN = "a stream of a bench on this machine"
_DEADLINE_S = 120.0
_WARM_FRAMES = 8


class Sink(HostService):
    """A host that receives, counts and answers once at the end; sessions hold no model."""

    def claim(self, key: SessionKey, lane: Lane = ONLY) -> SessionStream:
        """See `HostService.claim`."""
        session = self.find(key)
        with session.keep_at_rest():
            return session.claim(lane)

    def serve(self, stream: SessionStream, upstream: Link, behind: Link | None = None) -> None:
        """Receive until END, confirming every frame whose micro-batch number is not 0."""
        assert behind is None
        while (frame := upstream.receive(deadline_s=_DEADLINE_S)).kind is not FrameKind.END:
            if frame.micro_batch:
                upstream.send(Frame(kind=FrameKind.TOTALS), deadline_s=_DEADLINE_S)
        stream.session.fail("the bench is over")
        stream.session.end(stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much to move: frames of one hidden state of ``frame_bytes``."""

    frame_bytes: int = 2**20
    frames: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class WireCost:
    """What it took, per 10^9 bytes of tensors."""

    cpu_s_per_gb: float
    wall_s_per_gb: float


def wire_cost(crew: Crew, load: Load, tls: TlsFiles | None, codec: str = "fp32") -> WireCost:
    """Move ``load`` to worker 0 of ``crew``. Raises LinkError when the stream breaks."""
    address = crew.ask(0, "sink")
    hidden = torch.randn(load.frame_bytes // 4)
    with HostClient(address, tls=tls) as client:
        key = SessionKey(session_id=SINK, token=_TOKEN)
        session = client.open_session(SessionRequest(key=key, spec_json="{}"))
        link = session.stream(config=LinkConfig(codec=codec))
        _move(link, hidden, _WARM_FRAMES)
        before_s, start_s = _cpu_s(crew), time.perf_counter()
        _move(link, hidden, load.frames)
        cpu_s, wall_s = _cpu_s(crew) - before_s, time.perf_counter() - start_s
        link.send(Frame(kind=FrameKind.END), deadline_s=_DEADLINE_S)
        link.close()
    gigabytes = load.frames * load.frame_bytes / 1e9
    return WireCost(cpu_s_per_gb=cpu_s / gigabytes, wall_s_per_gb=wall_s / gigabytes)


def _move(link: Link, hidden: torch.Tensor, frames: int) -> None:
    """Send frames and wait until the last was taken."""
    for index in range(frames):
        last = int(index == frames - 1)
        frame = Frame(kind=FrameKind.ACTIVATION, micro_batch=last, tensors={HIDDEN: hidden})
        link.send(frame, deadline_s=_DEADLINE_S)
    link.receive(deadline_s=_DEADLINE_S)


def _cpu_s(crew: Crew) -> float:
    """CPU seconds of both ends so far."""
    there: float = crew.ask(0, "usage")["cpu_s"]
    return time.process_time() + there


def tls_step_ratio(job: Job, pace: Pace, network: Network, certificates: str) -> float:
    """Step time of a whole pipeline under mutual TLS over plain text, step by step in turn."""
    with Crew(job.stages, network) as plain, Crew(job.stages, network, certificates) as secured:
        crews = (plain, secured)
        for crew in crews:
            open_chain(crew, job)
        times = []
        for turn in range(pace.warm + pace.turns):
            order = (0, 1) if turn % 2 else (1, 0)
            took = {k: crews[k].ask(0, "steps", count=pace.steps)["wall_s"] for k in order}
            times.append(took[1] / took[0])
        for crew in crews:
            crew.ask(0, "close")
    ratio: float = median(times[pace.warm :])
    return ratio
