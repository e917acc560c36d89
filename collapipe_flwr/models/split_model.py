"""A user's live model, described so that it can be split: what `CollaPipe(model=...)` takes."""

from __future__ import annotations

import json

from transformers import PreTrainedModel

from collapipe_flwr.models.spec import BatchShape, ModelSpec
from collapipe_flwr.models.splitter import Splitter


class SplitModel:
    """Stand-in until the real one is merged."""

    def __init__(self, model: PreTrainedModel, *, batch_size: int, length: int) -> None:
        tasks = {"ForSequenceClassification": "sequence-classification"}
        task = next(t for end, t in tasks.items() if type(model).__name__.endswith(end))
        config = json.dumps(model.config.to_dict())
        self.spec = ModelSpec(task=task, config_json=config, ties="rows", shared="sum")
        self.splitter = Splitter(self.spec)
        self.shape = BatchShape(source_length=length)
        self.batch_size = batch_size
