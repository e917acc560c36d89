"""In which precision a part computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from collapipe_flwr.pipeline.compute import CPU


def computing_in(precision: str, place: torch.device = CPU) -> AbstractContextManager[object]:
    """Products in bfloat16 inside; the casts of weights pass gradients back to fp32 ones.

    Whatever dtype comes out travels as it is, so that a cut changes nothing here either.
    """
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(place.type, dtype=torch.bfloat16)
