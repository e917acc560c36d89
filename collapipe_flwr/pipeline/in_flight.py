"""What a stage keeps of a micro-batch until its backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from collapipe_flwr.pipeline.link import Frame


@dataclass(slots=True, kw_only=True)
class InFlight:
    """One micro-batch between its forward and its backward."""

    frame: Frame  # the input, without the hidden state; scalars: scale n_i / N, weight n_i
    hidden: Tensor | None  # the input whose gradient goes upstream; the first stage has none
    end: GradientEdge | None  # where the graph of the output ends, which itself may be freed
    shape: torch.Size  # of the output
    keeps: bool  # the graph; otherwise the whole part is computed again


def end_of(output: Tensor) -> GradientEdge | None:
    """Where the backward pass of an output begins; None if nothing behind it is trained."""
    return get_gradient_edge(output) if output.requires_grad else None
