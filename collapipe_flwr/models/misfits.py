"""Why a batch does not fit a model, in one sentence: asked after the library gave up.

The checks read the values of a batch, so they run only where something failed already.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from collapipe_flwr.models.tasks import IGNORED_LABEL, Task

# These begin to count behind the padding token's number.
_SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "camembert")


def most_positions(config: Any) -> int | None:
    """How many tokens a sequence may have; None where the model sets no limit."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    if config.model_type in _SHIFTED_POSITIONS:
        return positions - (config.pad_token_id or 0) - 1
    return positions


def misfit_of_inputs(config: Any, inputs: Mapping[str, Tensor]) -> str | None:
    """What is wrong with the tokens of a batch; None if it is something else."""
    ids = inputs.get("input_ids")
    if ids is None or ids.numel() == 0:
        return None
    vocabulary, positions = getattr(config, "vocab_size", None), most_positions(config)
    lowest, highest = int(ids.min()), int(ids.max())
    if vocabulary is not None and not 0 <= lowest <= highest < vocabulary:
        wrong = lowest if lowest < 0 else highest
        return (
            f"the batch holds token {wrong}, but the model's vocabulary has {vocabulary} tokens: "
            "use the tokenizer that belongs to the model"
        )
    if positions is not None and ids.shape[-1] > positions:
        return (
            f"the batch holds sequences of {ids.shape[-1]} tokens, but the model has only "
            f"{positions} positions: shorten them, or raise max_position_embeddings"
        )
    return None


def misfit_of_labels(config: Any, task: Task, labels: Tensor | None) -> str | None:
    """What is wrong with the labels of a batch; None if it is something else."""
    if labels is None or labels.is_floating_point():
        return None
    known = labels[labels != IGNORED_LABEL]
    classes = config.num_labels if task.labelled else _output_vocabulary(config)
    if classes is None or known.numel() == 0 or 0 <= int(known.min()) <= int(known.max()) < classes:
        return None
    wrong = int(known.min()) if int(known.min()) < 0 else int(known.max())
    way_out = (
        "give the model as many labels as the data has (num_labels)"
        if task.labelled
        else "use the tokenizer that belongs to the model"
    )
    return f"the batch holds the label {wrong}, but the model knows 0 to {classes - 1}: {way_out}"


def _output_vocabulary(config: Any) -> int | None:
    return getattr(config, "decoder_vocab_size", None) or getattr(config, "vocab_size", None)
