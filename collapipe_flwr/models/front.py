"""The control unit's part where the lower blocks are frozen: the embedding, and those blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collapipe_flwr.models.parts import EmbeddingPart, SegmentPart


class FrontPart(nn.Module):
    """Embedding and frozen blocks as one part, which trains nothing and drops nothing."""

    def __init__(self, embedding: EmbeddingPart, blocks: SegmentPart) -> None:
        super().__init__()
        self.embedding, self.blocks = embedding, blocks
        self.train(False)

    @property
    def model(self) -> Any:
        """The model in which the embedding is."""
        return self.embedding.model

    def train(self, mode: bool = True) -> FrontPart:
        """Stay in evaluation mode, whatever the ``mode``: what is frozen gives the same always."""
        del mode
        return super().train(False)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Compute the hidden states (B, T, D) behind the frozen blocks."""
        with torch.no_grad():
            hidden_BTD: Tensor = self.blocks(self.embedding(inputs), inputs)
        return hidden_BTD

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return owned tensors by absolute key, as ``Part`` does."""
        del args, kwargs
        return {**self.embedding.state_dict(), **self.blocks.state_dict()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all parameters by absolute key."""
        del recurse, remove_duplicate
        return chain(self.embedding.named_parameters(prefix), self.blocks.named_parameters(prefix))

    def block_context(self) -> dict[str, Tensor]:
        """Return nothing: blocks of transformers build their own arguments."""
        return {}

    def held_bytes(self) -> int:
        """Return the bytes of all owned tensors."""
        return self.embedding.held_bytes() + self.blocks.held_bytes()
