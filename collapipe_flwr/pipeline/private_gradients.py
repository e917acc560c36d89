"""Differentially private gradients: every example's are clipped, and noise is added to their sum.

A stage sees only a part of an example's gradient, and a plan must not change the mathematics.
So clipping is by group: a block is a group wherever it runs, and so are the embedding and the edge.
Each of G groups is clipped to C / sqrt(G), by which the norm of the whole gradient is at most C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import shake_256
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from collapipe_flwr.core.errors import ModelError, NotFinite
from collapipe_flwr.pipeline.config import ExamplePrivacy

if TYPE_CHECKING:
    from collapipe_flwr.models.part import Part

_CHUNK = 2**18  # pairs of numbers that are drawn at once


class PrivateGradients:
    """The gradients of one step of a part, example by example; ``parameters`` are those it trains.

    All parameters get noise in every step, also those that no example reaches.
    """

    def __init__(
        self, part: nn.Module, parameters: Mapping[str, Tensor], privacy: ExamplePrivacy
    ) -> None:
        self._parameters, self._privacy, self._part = parameters, privacy, part
        self._groups: dict[int, list[Tensor]] = {}
        for name, parameter in parameters.items():
            group = cast("Part", part).owner_of(name)
            self._groups.setdefault(group, []).append(parameter)
        self._sums: dict[Tensor, Tensor] = {}
        self._buffers = {name: b.detach().clone() for name, b in part.named_buffers()}

    def forget(self) -> None:
        """Drop what an earlier step may have left."""
        self._sums = {}

    def add_example(self, scale: float) -> None:
        """Clip the gradients of ``scale`` times one example's loss, and move them to the sum.

        Raises NotFinite for gradients that have no norm.
        """
        for group, parameters in self._groups.items():
            held = [parameter for parameter in parameters if parameter.grad is not None]
            if not held:
                continue
            gradients = [cast(Tensor, parameter.grad) for parameter in held]
            norm = math.hypot(*(float(torch.linalg.vector_norm(g)) for g in gradients))
            if not math.isfinite(norm):
                raise NotFinite(f"the gradient of an example in group {group} is not finite")
            most = scale * self._privacy.group_norm
            factor = min(1.0, most / norm) if norm else 1.0
            for parameter, gradient in zip(held, gradients, strict=True):
                parameter.grad = None
                if parameter in self._sums:
                    self._sums[parameter].add_(gradient, alpha=factor)
                else:
                    self._sums[parameter] = gradient.mul_(factor)

    def put_sums(self) -> None:
        """Give every parameter its sum as gradient, and forget the sums.

        Raises ModelError if the part changed a buffer, which no noise would cover.
        """
        for name, buffer in self._part.named_buffers():
            if not torch.equal(buffer, self._buffers[name]):
                raise ModelError(
                    f"the model changes its buffer {name} while it trains, and no noise would "
                    "cover that: train without privacy.clip-norm"
                )
        for parameter in self._parameters.values():
            found = self._sums.get(parameter)
            parameter.grad = torch.zeros_like(parameter) if found is None else found
        self._sums = {}

    def add_noise(self, step: int, scale: float) -> None:
        """Add the step's noise to every gradient, which is ``scale`` times a sum over examples.

        Replicas of a stage draw the same numbers, so the sum that they share gets noise once.
        """
        deviation, secret = scale * self._privacy.deviation, bytes.fromhex(self._privacy.secret)
        for name, parameter in self._parameters.items():
            if deviation:
                drawn = draw_normal(secret, step, name, parameter.numel()).view(parameter.shape)
                assert parameter.grad is not None
                parameter.grad.add_(drawn.to(parameter.grad), alpha=deviation)


def draw_normal(secret: bytes, step: int, name: str, count: int) -> Tensor:
    """Draw ``count`` standard normal numbers, the same wherever they are drawn.

    By Box and Muller's method from the bytes of SHAKE-256, which tell nothing of one another to
    those without the secret, as those of torch's generators would.
    """
    drawn = []
    for chunk, start in enumerate(range(0, count, 2 * _CHUNK)):
        pairs = -(-min(2 * _CHUNK, count - start) // 2)
        place = f"{step}/{chunk}/{name}".encode()
        data = bytearray(shake_256(secret + place).digest(16 * pairs))
        bits = torch.frombuffer(data, dtype=torch.int64)
        uniform = ((bits >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)  # in (0, 1)
        radius, angle = (-2 * uniform[:pairs].log()).sqrt(), 2 * math.pi * uniform[pairs:]
        drawn.append(torch.cat((radius * angle.cos(), radius * angle.sin())).float())
    return torch.cat(drawn)[:count] if drawn else torch.empty(0)
