"""Models that users might bring: own heads on transformers bodies, and plain torch modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, BertModel
from transformers.models.bert.modeling_bert import BertPreTrainedModel

VOCABULARY = 50


def bert_config(**changes: Any) -> BertConfig:
    """A tiny BERT without dropout."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "num_labels": 3,
    }
    return BertConfig(**{**sizes, **changes})


class TwoHeads(BertPreTrainedModel):
    """Pools over the mask, has two heads, and adds up two losses by itself."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.body = BertModel(config, add_pooling_layer=False)  # not the library's own name
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.tone = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor | None = None,
        tones: Tensor | None = None,
        sample_weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Logits (B, C) and tones (B,), and the weighted mean of both losses."""
        (hidden_BTD,) = self.body(input_ids, attention_mask=attention_mask, return_dict=False)[:1]
        mask_BT = attention_mask.unsqueeze(-1).to(hidden_BTD.dtype)
        pooled_BD = (hidden_BTD * mask_BT).sum(1) / mask_BT.sum(1)
        found = {"logits": self.classifier(pooled_BD), "tones": self.tone(pooled_BD).squeeze(-1)}
        if labels is not None and tones is not None and sample_weight is not None:
            found["loss"] = two_losses(
                found, {"labels": labels, "tones": tones, "sample_weight": sample_weight}
            )
        return found


def two_losses(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Classes and tones of every example, weighted."""
    classes = functional.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    tones = (outputs["tones"] - batch["tones"]) ** 2
    weight = batch["sample_weight"]
    return ((classes + 0.5 * tones) * weight).sum() / weight.sum()


class Smoothed(BertForSequenceClassification):
    """The library's own model with another loss."""


def smoothed(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Label smoothing."""
    return functional.cross_entropy(outputs.logits, batch["labels"], label_smoothing=0.1)


class AllStates(BertPreTrainedModel):
    """Its head reads the hidden states of all blocks."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits (B, C) of the mean over all blocks."""
        found = self.bert(input_ids, output_hidden_states=True)
        mean_BTD = torch.stack(found.hidden_states).mean(0)
        logits = self.classifier(mean_BTD[:, 0])
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}
