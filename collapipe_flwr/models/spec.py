"""What a model is, as one JSON string: it travels in Flower and gRPC messages, never as weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.config import SHARED_POLICIES, TIE_POLICIES, LoraConfig


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
    two independent tables with equal first values, ``rows`` keeps one at the edge (``ties.py``).
    ``shared`` says what happens to parameters that every block reads (T5's relative bias,
    DeBERTa's relative embeddings): ``freeze`` never trains them, ``sum`` leaves it to the caller
    to add up the gradients of their replicas before each optimiser step. ``untied`` names keys
    that the architecture ties but the checkpoint does not (the output table of T5 1.1).

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

    def __post_init__(self) -> None:
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
        """One string; the inverse of ``from_json``."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """Rebuild a spec; raises ModelError if ``text`` is not one."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as cause:
            raise ModelError(f"the model description is not JSON: {cause}") from cause
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not {"task", "config_json"} <= set(values) <= known:
            raise ModelError(f"a model description needs the keys {sorted(known)}")
        _require_config(values["config_json"])
        lists = {key: tuple(values.get(key, ())) for key in ("untied", "absent")}
        return cls(**{**values, **lists, "lora": _lora(values.get("lora"))})


def _lora(values: object) -> LoraConfig | None:
    if values is None:
        return None
    known = {field.name for field in fields(LoraConfig)}
    if not isinstance(values, dict) or not {"rank"} <= set(values) <= known:
        raise ModelError(f"the lora settings of a model need the keys {sorted(known)}")
    lists = {key: tuple(values.get(key, ())) for key in ("target_modules", "modules_to_save")}
    return LoraConfig(**{**values, **lists})


def _require_config(text: object) -> None:
    try:
        values = json.loads(text) if isinstance(text, str) else None
    except json.JSONDecodeError as cause:
        raise ModelError(f"the config_json of a model description is not JSON: {cause}") from cause
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError("the config_json of a model description needs an object with model_type")


def _require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ModelError(f"{key} must be one of {', '.join(choices)}, got {value!r}")
