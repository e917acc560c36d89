"""What a model is: the run-config's ``model.*`` and ``lora.*`` keys, and the ``ModelSpec`` that
travels in Flower and gRPC messages as one JSON string.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from collapipe_flwr.core.errors import ModelError, ProtocolError
from collapipe_flwr.core.json_codec import from_json
from collapipe_flwr.core.keys import (
    assignments,
    at_least,
    between,
    check_keys,
    key,
    one_of,
    read_assignments,
    words,
)

TIE_POLICIES = ("untie", "rows")
SHARED_POLICIES = ("freeze", "sum")
FROZEN_DTYPES = ("float32", "bfloat16", "int8")
_YOUNG = ("model_class", "loss", "weight", "frozen")
_DEMO = (
    "d_model=64 encoder_layers=6 decoder_layers=2 encoder_attention_heads=4 "
    "decoder_attention_heads=4 encoder_ffn_dim=128 decoder_ffn_dim=128 "
    "max_position_embeddings=64 scale_embedding=true init_std=0.05 dropout=0.0"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The transformer: built from a Hugging Face config, or loaded from a folder or the hub."""

    type: str = key("marian")  # a transformers model type; ignored when pretrained is set
    pretrained: str = key("")
    overrides: str = key(_DEMO, assignments())  # fields of its config; "" keeps them all
    edge_blocks: int = key(0, at_least(0))  # upper blocks that stay at the edge; no decoders
    ties: str = key("untie", one_of(*TIE_POLICIES))  # rows: one table, lent row by row
    shared: str = key("freeze", one_of(*SHARED_POLICIES))  # parameters that every block reads

    @property
    def settings(self) -> dict[str, object]:
        """``overrides`` as a mapping; the default ones shape the demo, never a checkpoint."""
        untouched = bool(self.pretrained) and self.overrides == _DEMO
        return {} if untouched else read_assignments(self.overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on a frozen checkpoint; only they (and a new head) train and travel.

    Adapters count ``alpha / rank`` times. ``target_modules`` are ends of module names, or the one
    word ``all-linear``; ``modules_to_save`` train in full and travel with the adapters. Frozen
    matrices are kept in ``frozen_dtype`` and widened for each product.
    """

    rank: int = key(0, at_least(0))  # 0: train all weights
    alpha: int = key(16, at_least(1))
    dropout: float = key(0.0, between(0, 0.99))
    target_modules: tuple[str, ...] = key((), words())  # empty: peft's choice
    modules_to_save: tuple[str, ...] = key((), words())  # empty: the head of a classifier
    frozen_dtype: str = key("float32", one_of(*FROZEN_DTYPES))  # in memory

    def __post_init__(self) -> None:
        check_keys(self, "lora.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Tokens per example (patches or frames count as tokens), after padding."""

    source_length: int
    target_length: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One transformer and the task it learns, without weights.

    ``config_json`` is the whole transformers configuration, ``model_type`` and labels included.
    ``pretrained`` names the folder or hub repository of the first weights; None draws them.
    The last ``edge_blocks`` blocks of a decoder-less model stay at the edge with its head.

    ``ties`` says what happens to a table that embedding and edge would share: ``untie`` makes
    two independent tables with equal first values, ``rows`` keeps one at the edge (``parts``).
    ``shared`` says what happens to parameters that every block reads (T5's relative bias,
    DeBERTa's relative embeddings): ``freeze`` never trains them, ``sum`` leaves it to the caller
    to add up the gradients of their replicas before each optimiser step. ``untied`` names keys
    that the architecture ties but the checkpoint does not (the output table of T5 1.1).

    ``model_class`` is the import path of a transformers class, own heads included; empty: that of
    the task. ``loss`` is that of a function of outputs and batch; empty: the model's own. The mean
    runs over ``weight`` (see ``Objective``; empty: labels, or examples where the loss or the head
    is an own one). ``frozen`` are keys that the user does not train.

    With ``lora`` only adapters (and ``modules_to_save``) train. What is frozen is read by every
    part from ``pretrained`` itself, but for the keys ``absent`` there, which travel.
    """

    task: str
    config_json: str
    pretrained: str | None = None
    edge_blocks: int = 0
    ties: str = "untie"
    shared: str = "freeze"
    untied: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    absent: tuple[str, ...] = ()
    model_class: str = ""
    loss: str = ""
    weight: str = ""
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("model_class", "loss", "weight"):
            if not isinstance(getattr(self, name), str):
                raise ModelError(f"{name} must be a text, got {getattr(self, name)!r}")
        _require_choice("ties", self.ties, TIE_POLICIES)
        _require_choice("shared", self.shared, SHARED_POLICIES)
        if self.edge_blocks < 0:
            raise ModelError(f"edge_blocks must be 0 or more, got {self.edge_blocks}")
        if self.lora is not None and self.lora.rank < 1:
            raise ModelError(f"the lora settings of a model need a rank >= 1, got {self.lora.rank}")

    @property
    def model_type(self) -> str:
        """The transformers name of the architecture, for example ``bert``."""
        return str(json.loads(self.config_json)["model_type"])

    def to_json(self) -> str:
        """One string; the inverse of ``from_json``.

        Hosts of older versions know no ``_YOUNG`` key, so these are left out where empty.
        """
        values = asdict(self)
        kept = {k: value for k, value in values.items() if value or k not in _YOUNG}
        return json.dumps(kept, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Rebuild a spec; raises ModelError if ``text`` is not one."""
        try:
            spec = from_json(cls, text, "the model description")
        except ProtocolError as error:
            raise ModelError(str(error)) from error
        _require_config(spec.config_json)
        return spec


def _require_config(text: str) -> None:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as cause:
        raise ModelError(f"the config_json of a model description is not JSON: {cause}") from cause
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError("the config_json of a model description needs an object with model_type")


def _require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ModelError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
