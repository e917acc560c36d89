"""What every machine must agree on before training: the tokenizer and the names of the labels.

The server makes it once and sends it along; a control unit never learns its own, since its local
data may lack a label or spell words differently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from collapipe_flwr.core.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer as JSON, and for classification the label names in the order of their ids."""

    tokenizer_json: str
    labels: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One JSON string, for a record or a file."""
        return json.dumps({"tokenizer": self.tokenizer_json, "labels": self.labels})

    @staticmethod
    def from_json(text: str) -> Vocabulary:
        """The inverse of ``to_json``. Raises DataError for anything else."""
        try:
            record = json.loads(text)
            return Vocabulary(tokenizer_json=record["tokenizer"], labels=tuple(record["labels"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                "the vocabulary that came with the model is damaged: send it again"
            ) from error
