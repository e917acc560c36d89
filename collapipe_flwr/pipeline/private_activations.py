"""Differentially private hidden states: every example's are clipped, and noise is added to them.

The place is behind a block, wherever that runs, so that a plan does not change the mathematics.
What comes behind it, on devices that are not trusted, is a function of noised states and labels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from collapipe_flwr.core.errors import NotFinite
from collapipe_flwr.pipeline.config import ActivationNoise
from collapipe_flwr.pipeline.private_gradients import draw_normal


class PrivateActivations:
    """Clips and adds noise to the hidden states of micro-batches, ``at`` whose place it is told.

    The noise depends on that place and the secret alone: a pass that is repeated, by recomputation,
    a replay or an audit, draws the same.
    """

    def __init__(self, noise: ActivationNoise) -> None:
        self._noise = noise
        self.at = (0, 0)  # step and micro-batch

    def __call__(self, hidden_BTD: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Return noised states (B, T, D), which are 0 where a mask is; gradients pass the clip.

        Raises NotFinite for states that have no norm.
        """
        mask_BT = hidden_BTD.new_ones(hidden_BTD.shape[:2]) if mask_BT is None else mask_BT
        absent = mask_BT[..., None] == 0
        states = hidden_BTD.masked_fill(absent, 0.0).float()
        norms = torch.linalg.vector_norm(states, dim=(1, 2), keepdim=True)
        if not bool(norms.isfinite().all()):
            raise NotFinite(f"the hidden states of an example in step {self.at[0]} are not finite")
        smallest = torch.finfo(norms.dtype).tiny  # keeps the gradient of 0 a number
        noised = states * (self._noise.norm / norms.clamp_min(smallest)).clamp(max=1.0)
        if self._noise.deviation:
            step, micro_batch = self.at
            secret, name = bytes.fromhex(self._noise.secret), f"activations/{micro_batch}"
            drawn = draw_normal(secret, step, name, noised.numel()).view(noised.shape)
            drawn = drawn.to(noised).masked_fill(absent, 0.0)
            noised = noised.add(drawn, alpha=self._noise.deviation)
        found: Tensor = noised.to(hidden_BTD.dtype)
        return found
