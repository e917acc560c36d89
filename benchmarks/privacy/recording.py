"""Frames of a real training of a cluster, as a tap on every link sees them.

One device holds the blocks between two cuts. Links are exact; `coded` is what a codec leaves of
a hidden state, by the bytes of its frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.plans import make_plan
from benchmarks.privacy.study import SEED, Batch, Study
from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.federation.client.pipeline_round import micro_batch
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import ActivationNoise
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, Frame, FrameKind, Link
from collapipe_flwr.pipeline.optimizer_settings import OptimizerConfig
from collapipe_flwr.pipeline.roles import MiddleStage
from collapipe_flwr.transport.codec import decode_frame, encode_frame

_DEADLINE_S = 3600.0  # one core computes all stages


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One round: what crossed the link behind each cut, step by step, and the update.

    Hidden states and their gradients are (B, T, D), by depth.
    """

    batches: list[Batch]
    hidden: dict[int, list[Tensor]]
    gradients: dict[int, list[Tensor]]
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Tap:
    """A link that keeps what passes, either way."""

    link: Link
    seen: list[Frame] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    def send(self, frame: Frame, *, deadline_s: float) -> None:
        self.seen.append(frame)
        self.link.send(frame, deadline_s=deadline_s)

    def receive(self, *, deadline_s: float) -> Frame:
        frame = self.link.receive(deadline_s=deadline_s)
        self.seen.append(frame)
        return frame


def record(
    study: Study,
    splitter: Splitter,
    batches: list[Batch],
    activations: ActivationNoise | None = None,
) -> Recording:
    """Train one step per batch, each a micro-batch, and keep every frame."""
    weights, _ = splitter.first_weights(SEED)
    order = TrainingOrder(
        plan=make_plan("A", study.sizes.cuts[1:], size=study.sizes.batch),
        weights=weights,
        learning=LearningSettings(
            optimizer=OptimizerConfig(learning_rate=study.sizes.learning_rate, weight_decay=0.0),
            deadline_s=_DEADLINE_S,
        ),
        dropout_seed=SEED if splitter.drops else None,
        activations=activations,
    )
    taps: list[_Tap] = []

    def tapped(*parts: Any, upstream: Link, downstream: Link, **more: Any) -> MiddleStage:
        """Tap each device's link to the one before, and the last one's to the edge."""
        taps.append(_Tap(upstream))
        link = taps[-1]
        if len(taps) == len(order.plan.segments):
            taps.append(_Tap(downstream))
            downstream = taps[-1]
        return MiddleStage(*parts, upstream=link, downstream=downstream, **more)

    steps = [[micro_batch(splitter, batch)] for batch in batches]
    result = train_round(splitter, order, steps, ThreadFleet(ThreadEdge(), tapped))
    return Recording(
        batches=batches,
        hidden=_tensors(study, taps, FrameKind.ACTIVATION, HIDDEN),
        gradients=_tensors(study, taps, FrameKind.GRADIENT, GRAD),
        before=weights,
        after=dict(result.weights),
    )


def _tensors(
    study: Study, taps: Sequence[_Tap], kind: FrameKind, name: str
) -> dict[int, list[Tensor]]:
    return {
        depth: [f.tensors[name] for f in tap.seen if f.kind is kind and name in f.tensors]
        for depth, tap in zip(study.sizes.cuts, taps, strict=True)
    }


def coded(hidden: Tensor, codec: str) -> Tensor:
    """A hidden state as a receiver reads it from the bytes of a frame."""
    sent = encode_frame(Frame(kind=FrameKind.ACTIVATION, tensors={HIDDEN: hidden}), codec)
    return decode_frame(sent).tensors[HIDDEN]


@torch.no_grad()
def compute_hidden(
    splitter: Splitter, weights: Mapping[str, Tensor], batches: Iterable[Batch], cuts: Sequence[int]
) -> Iterator[tuple[Batch, dict[int, Tensor]]]:
    """What whoever has the weights computes himself: hidden states of texts, by depth."""
    embedding = splitter.build_embedding(weights)
    segments = {
        stop: splitter.build_segment(start, stop, weights) for start, stop in pairwise(cuts)
    }
    for batch in batches:
        hidden, context = splitter.embed(embedding, weights, batch)
        found = {0: hidden}
        for stop, segment in segments.items():
            hidden = segment(hidden, context)
            found[stop] = hidden
        yield batch, found
