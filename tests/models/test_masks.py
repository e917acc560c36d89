"""Masks that are made here are the library's, bit by bit and stride by stride."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig
from transformers.masking_utils import create_bidirectional_mask

from collapipe_flwr.models.families import bidirectional


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kept", [[5, 3, 1], [5, 5, 5], [0, 5, 2]])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_the_mask_of_an_encoder_is_the_library_s(attention, kept, dtype):
    config = BertConfig()
    config._attn_implementation = attention
    hidden = torch.zeros(3, 5, 8)
    mask = (torch.arange(5) < torch.tensor(kept)[:, None]).to(dtype)
    stack = SimpleNamespace(config=config)
    found = bidirectional(stack, hidden, {"attention_mask": mask})(0)["attention_mask"]
    expected = create_bidirectional_mask(config, hidden, mask)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert torch.equal(found, expected) and found.stride() == expected.stride()
        assert found.dtype == expected.dtype
