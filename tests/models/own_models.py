"""Models that users might bring: own heads on transformers bodies, and plain torch modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    DINOv3ViTPreTrainedModel,
    ElectraConfig,
    ElectraModel,
    ElectraPreTrainedModel,
)
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


def reads_pictures(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """What stays ahead of the blocks."""
    del outputs
    return batch["x"].mean()


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


class TextClassifier(nn.Module):
    """torch's encoder with a padding mask, learned positions, and a mean over the tokens."""

    def __init__(self, blocks: int = 4, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 48, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, blocks, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T), 0 is padding, to logits (B, C)."""
        padding_BT = tokens == 0
        hidden_BTD = self.embed(tokens) + self.positions[: tokens.shape[1]]
        hidden_BTD = self.encoder(hidden_BTD, src_key_padding_mask=padding_BT)
        kept_BT = (~padding_BT).unsqueeze(-1).to(hidden_BTD.dtype)
        logits: Tensor = self.head((hidden_BTD * kept_BT).sum(1) / kept_BT.sum(1))
        return logits


class VisionTransformer(nn.Module):
    """As torchvision's: a convolution, a class token, learned positions, blocks in a Sequential."""

    def __init__(self, blocks: int = 4, width: int = 32, classes: int = 3) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.layers = nn.Sequential(*(PreNormBlock(width) for _ in range(blocks)))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        logits: Tensor = self.head(self.ln(self.body(x))[:, 0])
        return logits

    def body(self, x: Tensor) -> Tensor:
        """Pictures to hidden states (B, T, D)."""
        patches_BTD = self.conv_proj(x).flatten(2).transpose(1, 2)
        first_BTD = self.class_token.expand(len(x), -1, -1)
        hidden_BTD = torch.cat([first_BTD, patches_BTD], dim=1) + self.pos_embedding
        found: Tensor = self.layers(hidden_BTD)
        return found


class Probes(VisionTransformer):
    """Trains what stands behind its blocks alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        with torch.no_grad():
            hidden_BTD = self.body(x)
        logits: Tensor = self.head(self.ln(hidden_BTD)[:, 0])
        return logits


class ProbesText(BertPreTrainedModel):
    """The same with a body of transformers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits (B, C) and their loss."""
        hidden_BTD = self.bert(input_ids).last_hidden_state.detach()
        found = {"logits": self.classifier(hidden_BTD[:, 0])}
        if labels is not None:
            found["loss"] = functional.cross_entropy(found["logits"], labels)
        return found


class PreNormBlock(nn.Module):
    """Attention and a small network, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, D) to the same."""
        normed_BTD = self.ln_1(hidden_BTD)
        hidden_BTD = hidden_BTD + self.attention(normed_BTD, normed_BTD, normed_BTD)[0]
        changed: Tensor = hidden_BTD + self.mlp(self.ln_2(hidden_BTD))
        return changed


class NeedsWidth(VisionTransformer):
    """Cannot be built without arguments."""

    def __init__(self, width: int) -> None:
        super().__init__(width=width)


def sixteen_wide() -> NeedsWidth:
    """What builds it with them."""
    return NeedsWidth(16)


class Dropping(TextClassifier):
    """The same with dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)


class AloneBlock(PreNormBlock):
    """Learns from its own result only."""

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, D) to the same."""
        return super().forward(hidden_BTD.detach())


class LearnsAbove(VisionTransformer):
    """No gradient leaves its last block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(AloneBlock(32) for _ in range(4)))


class NoisyBlock(PreNormBlock):
    """Adds noise in training."""

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, D) to the same."""
        changed_BTD = super().forward(hidden_BTD)
        return changed_BTD + 0.1 * torch.randn_like(changed_BTD) if self.training else changed_BTD


class Noisy(VisionTransformer):
    """Noise in all blocks, and in front of them from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(NoisyBlock(32) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        own = torch.Generator().manual_seed(3)
        return super().forward(x + torch.randn(x.shape, generator=own))


class NormBlock(nn.Module):
    """A layer whose result depends on the other examples of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, hidden_BD: Tensor) -> Tensor:
        """(B, D) to the same."""
        changed: Tensor = hidden_BD + self.linear(self.norm(hidden_BD).relu())
        return changed


class BatchNormed(nn.Module):
    """BatchNorm ahead of the blocks, in them and behind."""

    def __init__(self, width: int = 12, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width))
        self.blocks = nn.ModuleList(NormBlock(width) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, 5) to logits (B, C)."""
        hidden_BD = self.stem(x)
        for block in self.blocks:
            hidden_BD = block(hidden_BD)
        logits: Tensor = self.head(self.norm(hidden_BD))
        return logits


class Decoder(nn.Module):
    """Writes on: a causal mask that all blocks get, tied tables, and a loss of its own."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 48, 0.0, batch_first=True) for _ in range(blocks)
        )
        self.register_buffer("angles", torch.arange(16.0)[:, None] / width, persistent=False)
        self.out = nn.Linear(width, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Token ids (B, T) to logits (B, T, V) and the mean loss of the labels."""
        length = input_ids.shape[1]
        causal_mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden_BTD = self.embed(input_ids) + self.angles[:length].sin()
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, src_mask=causal_mask, is_causal=True)
        logits = self.out(hidden_BTD)
        return {"logits": logits, "loss": functional.cross_entropy(logits.mT, labels)}


class CausalEncoder(TextClassifier):
    """torch looks at the values of the mask to find out that it is causal."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) to logits (B, C)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.encoder(self.embed(tokens), mask=mask)[:, -1])
        return logits


class Masked(Decoder):
    """Its causal mask is a buffer, as language models of one's own often have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("causal_mask", torch.ones(7, 7).triu(1).bool())

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Token ids (B, 7) to logits (B, 7, V) and the mean loss of the labels."""
        hidden_BTD = self.embed(input_ids)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, src_mask=self.causal_mask)
        logits = self.out(hidden_BTD)
        return {"logits": logits, "loss": functional.cross_entropy(logits.mT, labels)}


class RotaryBlock(nn.Module):
    """Turns hidden states by angles that come as complex numbers, and in a pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(
        self, hidden_BTD: Tensor, turns: Tensor, pair: tuple[Tensor, Tensor], *, scale: float
    ) -> tuple[Tensor, None]:
        """(B, T, D) to the same, in a tuple."""
        turned = torch.view_as_complex(hidden_BTD.unflatten(-1, (-1, 2))) * turns
        changed_BTD = torch.view_as_real(turned).flatten(-2) * pair[0] + pair[1]
        return hidden_BTD + self.linear(changed_BTD) * scale, None


class Rotary(nn.Module):
    """As language models of one's own are often written."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        angles = torch.arange(16.0)[:, None] * torch.arange(1.0, width // 2 + 1)
        self.turns = torch.polar(torch.ones_like(angles), angles)  # no buffer
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(RotaryBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids (B, T) to logits (B, C)."""
        hidden_BTD = self.embed(tokens)
        turns = self.turns[: tokens.shape[1]]
        pair = (torch.full((1,), 0.5), torch.zeros(1))
        for layer in self.layers:
            hidden_BTD, _ = layer(hidden_BTD, turns, pair, scale=0.1)
        logits: Tensor = self.head(hidden_BTD[:, -1])
        return logits


# What cannot be cut


class Skips(VisionTransformer):
    """Its head reads the embedding as well."""

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        hidden_BTD = self.conv_proj(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.layers(hidden_BTD)[:, 0] + hidden_BTD[:, 0])
        return logits


class CollectsStates(VisionTransformer):
    """Its head reads the results of all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        hidden_BTD, states = self.conv_proj(x).flatten(2).transpose(1, 2), []
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD)
            states.append(hidden_BTD)
        logits: Tensor = self.head(torch.stack(states).mean(0)[:, 0])
        return logits


class Repeats(VisionTransformer):
    """One block that runs four times."""

    def __init__(self) -> None:
        super().__init__()
        block = PreNormBlock(32)
        self.layers = nn.Sequential(*(block for _ in range(4)))


class SharesHalf(VisionTransformer):
    """Blocks that have a layer in common."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.mlp[0] = self.layers[0].mlp[0]


class Decides(VisionTransformer):
    """Takes one of two ways."""

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        if x.mean() > 0:
            x = -x
        return super().forward(x)


class Interferes(VisionTransformer):
    """Does something between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        hidden_BTD = self.conv_proj(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD) * 0.5
        logits: Tensor = self.head(hidden_BTD[:, 0])
        return logits


class DrawsUnseen(VisionTransformer):
    """Draws by a function that calls what could be seeded."""

    def forward(self, x: Tensor) -> Tensor:
        """Pictures (B, 3, 16, 16) to logits (B, C)."""
        return super().forward(x + nn.init.normal_(torch.empty_like(x)))


class LearnsBias(nn.Module):
    """Its blocks read a bias that is learned ahead of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True) for _ in range(3)
        )
        self.bias = nn.Parameter(torch.zeros(4, 4))
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, 4, 32) to logits (B, C)."""
        for layer in self.layers:
            x = layer(x, src_mask=self.bias)
        logits: Tensor = self.head(x[:, 0])
        return logits


class ResidualNetwork(nn.Module):
    """Stages of different widths, as ResNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))) for _ in range(2)
        )
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.narrows = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 2)."""
        found: Tensor = self.narrows(self.first(x))
        return found


class NoBlocks(nn.Module):
    """No list of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to (B, 3)."""
        found: Tensor = self.two(self.one(x).relu())
        return found


class NeedsSize(NoBlocks):
    """Cannot be built without arguments."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def narrow() -> NoBlocks:
    """In another dtype than its class makes."""
    return NoBlocks().bfloat16()


def makes_a_number() -> int:
    """No module."""
    return 3


class Wrapped(nn.Module):
    """A module around a body of the library, as many people write them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = BertModel(bert_config(), add_pooling_layer=False)
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Token ids and mask (B, T) to logits (B, C)."""
        found = self.body(input_ids=input_ids, attention_mask=attention_mask)
        logits: Tensor = self.head(found.last_hidden_state[:, 0])
        return logits


class ScaledBody(BertModel):
    """A body that does more than the library's own around its blocks."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
        self.scale = nn.Parameter(torch.full((config.hidden_size,), 0.5))

    def forward(
        self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Scales the last hidden states (B, T, D)."""
        found = super().forward(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        found["last_hidden_state"] = found["last_hidden_state"] * self.scale
        return found


class OnScaledBody(BertPreTrainedModel):
    """A head on it, that reads no attention mask."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = ScaledBody(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits (B, C) and the mean loss."""
        logits = self.classifier(self.bert(input_ids)["last_hidden_state"][:, 0])
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = functional.cross_entropy(logits, labels)
        return found


class OnElectra(ElectraPreTrainedModel):
    """A head on a body without a record."""

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__(config)
        self.electra = ElectraModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Logits (B, C) and the mean loss."""
        hidden_BTD = self.electra(input_ids, attention_mask).last_hidden_state
        found = {"logits": self.classifier(hidden_BTD.mean(1))}
        if labels is not None:
            found["loss"] = functional.cross_entropy(found["logits"], labels)
        return found


def electra_config() -> ElectraConfig:
    """A tiny one without dropout."""
    return ElectraConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )


def dino_config(rescale: float | None) -> DINOv3ViTConfig:
    """Positions are stretched by chance in training where there is a ``rescale``."""
    return DINOv3ViTConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=3,
        pos_embed_rescale=rescale,
    )


class OnDino(DINOv3ViTPreTrainedModel):
    """A head on a body whose positions are kept from call to call."""

    def __init__(self, config: DINOv3ViTConfig) -> None:
        super().__init__(config)
        self.body = DINOv3ViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.classifier(self.body(pixel_values).last_hidden_state[:, 0])
        found = {"logits": logits}
        return (
            found if labels is None else {**found, "loss": functional.cross_entropy(logits, labels)}
        )
