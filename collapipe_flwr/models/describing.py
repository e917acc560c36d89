"""Turn what a user writes or trains into a spec, from which other machines build the same model.

Models of transformers are described by a configuration; `module_description` has other modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import find_path, is_within
from collapipe_flwr.models.checkpoint import (
    build_published_skeleton,
    checkpoint_misfit,
    read_pretrained_config,
)
from collapipe_flwr.models.discovery import NEEDS_VALUES, VALUE_ERRORS, make_refusal
from collapipe_flwr.models.families import FAMILIES, LAYERDROPS, missing_token
from collapipe_flwr.models.foreign_errors import UNFIT, translate_errors
from collapipe_flwr.models.likeness import refuse_differences
from collapipe_flwr.models.lora import find_default_targets, find_head_modules, key_of
from collapipe_flwr.models.profile import profile_shapes
from collapipe_flwr.models.skeleton import build_skeleton
from collapipe_flwr.models.spec import (
    BatchShape,
    LoraConfig,
    ModelSpec,
    suggest,
    unknown_setting,
    unknown_type,
)
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.tasks import find_built_class, find_task, recognize_task

_SPECIAL_TOKENS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "cls_token_id",
    "sep_token_id",
    "decoder_start_token_id",
)
_NEVER_READ = ("cls_token_id", "sep_token_id")
_NOT_APART = (
    "its parts do not run apart from each other, since its library computes with more than hidden "
    "states of one shape around its blocks"
)
_SET_IN_CONFIG = "set it in the model's configuration, or in a class of your own that builds it so"
_NO_START = "decoder_start_token_id is not set; take it from the tokenizer"


def make_spec(
    task: str,
    *,
    model_type: str | None = None,
    pretrained: str | None = None,
    overrides: Mapping[str, object] | None = None,
    vocab_size: int | None = None,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    decoder_start_token_id: int | None = None,
    num_labels: int | None = None,
    id2label: Mapping[int, str] | None = None,
    edge_blocks: int = 0,
    frozen_blocks: int = 0,
    ties: str = "untie",
    shared: str = "freeze",
    lora: LoraConfig | None = None,
) -> ModelSpec:
    """Describe a model from scratch (``model_type``) or from a checkpoint (``pretrained``).

    ``overrides`` are configuration keys (``hidden_size``, ``encoder_layers``, ...); vocabulary
    and token ids come from the tokenizer, None leaves the configuration's own. ``lora`` without
    target modules gets peft's own choice for the architecture, without ``modules_to_save`` a
    labelled task's head; rank 0 means no adapters. ``frozen_blocks`` and the embedding below them
    neither train nor have adapters. Raises ModelError for an unknown type, task,
    key or value, and for a model that cannot be split.
    """
    labelled = find_task(task).labelled
    config = _make_config(model_type, pretrained, overrides or {})
    if vocab_size is not None:
        _set_vocabulary(config, vocab_size, pretrained)
    _set_tokens(
        config,
        pad_token_id=pad_token_id,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        decoder_start_token_id=decoder_start_token_id,
    )
    if pretrained is None:
        _forget_foreign_tokens(config)
    if labelled:
        _set_labels(config, num_labels, id2label)
    for key in LAYERDROPS:  # the splitter refuses one that the user sets
        if hasattr(config, key) and key not in (overrides or {}):
            setattr(config, key, 0.0)
    _set_exact_training(config, ties)
    spec = ModelSpec(
        task=task,
        config_json=config.to_json_string(use_diff=False),
        pretrained=pretrained,
        edge_blocks=edge_blocks,
        ties=ties,
        shared=shared,
    )
    splitter = Splitter(spec)  # fails here, not on a device
    if not splitter.has_record:
        rehearse(splitter)
    if pretrained is not None and splitter.decodes:
        spec = replace(spec, untied=splitter.find_untied_keys())
    if frozen_blocks:
        spec = replace(spec, frozen=_list_frozen(splitter, frozen_blocks))
    return _adapt(spec, lora) if lora and lora.rank else spec


def _list_frozen(splitter: Splitter, blocks: int) -> tuple[str, ...]:
    """List the keys of the embedding and the first blocks; raises ModelError."""
    if blocks > splitter.num_blocks:
        raise ModelError(
            f"frozen_blocks must be at most the {splitter.num_blocks} blocks of the devices, got "
            f"{blocks}"
        )
    if splitter.ties:
        raise ModelError(
            f"frozen_blocks freezes the embedding, but {min(splitter.ties)!r} is also the output "
            "table: set ties to 'untie'"
        )
    return splitter.front_keys(blocks)


def keep_frozen(spec: ModelSpec, *, without_dropout: bool = False) -> ModelSpec:
    """Keep embedding and frozen lower blocks at the control unit, where they are never trained.

    One block is left for devices at least. Raises ModelError where nothing below is frozen, and,
    unless that is to be computed ``without_dropout``, where it drops anything in training.
    """
    plain = Splitter(spec)
    blocks = min(plain.count_frozen(), plain.num_blocks - 1)
    if blocks < 1:
        raise ModelError(
            "nothing can be kept of the lower blocks, since the embedding or the first of them is "
            "trained: freeze both, as by model.frozen-blocks"
        )
    if not without_dropout and (name := plain.find_dropout(blocks)) is not None:
        raise ModelError(
            f"the frozen blocks draw dropout ({name}), so their results differ from visit to "
            "visit: set its share to 0 in the model's configuration, or cache.dropout=off in a "
            "run-config, which computes them without"
        )
    return replace(spec, held_blocks=blocks)


def describe_live(model: PreTrainedModel, *, ties: str, **choices: Any) -> ModelSpec:
    """Describe a live model, with own heads and frozen parameters but without weights.

    ``choices`` are fields of its spec. Raises ModelError if it cannot be split.
    """
    kind = type(model)
    config: PreTrainedConfig = deepcopy(model.config)
    _set_exact_training(config, ties)
    task = recognize_task(kind)
    own = find_built_class(task, config) is not kind
    spec = ModelSpec(
        task=task,
        config_json=config.to_json_string(use_diff=False),
        ties=ties,
        model_class=find_path(kind, "the model") if own else "",
        **choices,
    )
    splitter = Splitter(spec)
    refuse_differences(model, build_skeleton(spec), _SET_IN_CONFIG, same_ties=ties != "untie")
    parameters = model.named_parameters(remove_duplicate=False)  # tied ones by all of their names
    frozen = {key_of(name) for name, tensor in parameters if not tensor.requires_grad}
    frozen -= splitter.constant_keys
    spec = replace(spec, frozen=tuple(key for key in splitter.all_keys() if key in frozen))
    if own or not splitter.has_record:
        rehearse(splitter)
    return spec


def _adapt(spec: ModelSpec, lora: LoraConfig) -> ModelSpec:
    """Add adapters to ``spec``, and fill in their defaults."""
    plain = build_skeleton(spec)
    head = find_head_modules(plain) if find_task(spec.task).labelled else ()
    if not lora.target_modules:
        lora = replace(lora, target_modules=find_default_targets(spec.model_type))
    if not lora.modules_to_save:
        lora = replace(lora, modules_to_save=head)
    _refuse_unknown(plain, lora)
    if spec.pretrained is None:
        return replace(spec, lora=lora)
    _refuse_tied(build_published_skeleton(spec), lora)
    spec = replace(spec, lora=lora)
    splitter = Splitter(spec)
    absent = splitter.find_absent_keys()
    if lost := sorted(splitter.body_keys.intersection(absent)):
        raise checkpoint_misfit(spec, "missing", lost)
    if untrained := [name for name in head if any(is_within(key, [name]) for key in absent)]:
        raise ModelError(
            f"lora.modules-to-save {' '.join(lora.modules_to_save)!r} leaves out "
            f"{' '.join(untrained)!r} of the head, which the checkpoint {spec.pretrained!r} lacks: "
            "add it, or its weights stay random"
        )
    return replace(spec, absent=absent)


def _refuse_unknown(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Raise ModelError for a name to train in full that ends no module's, which peft ignores."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for name in lora.modules_to_save:
        if not any(path.endswith(name) for path in paths):
            near = suggest(name, {path.rpartition(".")[2] for path in paths})
            raise ModelError(
                f"lora.modules-to-save names {name!r}, but no module of a "
                f"{model.config.model_type!r} model ends so; "
                f"{near or 'give the end of a name in named_modules()'}"
            )


def _refuse_tied(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Raise ModelError for a tied table among the modules to train in full."""
    tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
    for name in lora.modules_to_save:
        owners = [key for key in tied if key.rpartition(".")[0].endswith(name)]
        if owners:
            raise ModelError(
                f"lora.modules-to-save names {name!r}, whose table {owners[0]!r} is tied to "
                "another one; leave it frozen"
            )


def _make_config(
    model_type: str | None, pretrained: str | None, overrides: Mapping[str, object]
) -> PreTrainedConfig:
    if (model_type is None) == (pretrained is None):
        raise ModelError("name either a model_type (random weights) or a pretrained checkpoint")
    config = None if pretrained is None else read_pretrained_config(pretrained)
    if config is None and model_type not in CONFIG_MAPPING:
        raise unknown_type(str(model_type))
    config_class: Any = type(config) if config else CONFIG_MAPPING[str(model_type)]
    with translate_errors(f"model type {config.model_type if config else model_type!r}"):
        _check_keys(config_class, overrides)
        if config is None:
            return config_class(**overrides)  # type: ignore[no-any-return]
        for key, value in overrides.items():
            setattr(config, key, value)
    return config


def _check_keys(config_class: Any, overrides: Mapping[str, object]) -> None:
    family = FAMILIES.get(config_class.model_type)
    known = set(config_class().to_dict()) | set(config_class.attribute_map)
    known |= set(family.settings) if family else set()
    for key in overrides:
        if key not in known:
            raise unknown_setting(key, config_class.model_type, known)


def _set_vocabulary(config: PreTrainedConfig, vocab_size: int, pretrained: str | None) -> None:
    if pretrained is None:
        config.vocab_size = vocab_size
        if config.model_type == "marian":
            config.decoder_vocab_size = vocab_size
        return
    own = getattr(config, "vocab_size", None)  # a model of several kinds of input keeps it deeper
    if own is not None and vocab_size > own:
        raise ModelError(
            f"the tokenizer has {vocab_size} tokens, the checkpoint {pretrained!r} only {own}; "
            "use the checkpoint's own tokenizer"
        )


def _set_tokens(config: PreTrainedConfig, **tokens: int | None) -> None:
    size = getattr(config, "vocab_size", None)
    for key, token in tokens.items():
        if token is None:
            continue
        if size is not None and not 0 <= token < size:
            raise ModelError(f"{key} must be below the vocabulary's {size} tokens, got {token}")
        setattr(config, key, token)


def _forget_foreign_tokens(config: PreTrainedConfig) -> None:
    """Unset default token ids that are beyond this vocabulary: they are the published model's."""
    size = getattr(config, "vocab_size", None)
    if size is None:
        return
    for key in _SPECIAL_TOKENS:
        token = getattr(config, key, None)
        if isinstance(token, int) and token >= size:
            try:
                setattr(config, key, None)
            except StrictDataclassError as cause:  # some types require a number without reading it
                if key not in _NEVER_READ:
                    raise missing_token(config, key) from cause
    for key in ("suppress_tokens", "begin_suppress_tokens"):
        named = getattr(config, key, None)
        if named is not None:
            setattr(config, key, [token for token in named if token < size] or None)
    if getattr(config, "forced_eos_token_id", None) is not None:
        config.forced_eos_token_id = config.eos_token_id


def _set_labels(
    config: PreTrainedConfig, num_labels: int | None, id2label: Mapping[int, str] | None
) -> None:
    if id2label is not None:
        if num_labels not in (None, len(id2label)):
            raise ModelError(f"num_labels is {num_labels}, id2label names {len(id2label)} labels")
        config.id2label = dict(id2label)
        config.label2id = {name: index for index, name in id2label.items()}
        config.problem_type = None  # a checkpoint may be of regression or of several labels
    elif num_labels is not None:
        if num_labels < 1:
            raise ModelError(f"num_labels must be 1 or more, got {num_labels}")
        config.num_labels = num_labels


def _set_exact_training(config: PreTrainedConfig, ties: str) -> None:
    """Set what a cut model needs: single precision, outputs by name, and untied tables.

    The library unties where it has a setting for it; the splitter unties the rest.
    """
    config.dtype = "float32"
    config.return_dict = True
    if ties != "untie":
        return
    if config.model_type == "marian":
        config.share_encoder_decoder_embeddings = False
    if not config.is_encoder_decoder:
        config.tie_word_embeddings = False


def rehearse(splitter: Splitter) -> None:
    """Run all parts once, on shapes only; raises ModelError where that fails."""
    try:
        profile_shapes(splitter, BatchShape(source_length=2, target_length=2))
    except VALUE_ERRORS as cause:
        raise make_refusal(splitter.spec, NEEDS_VALUES) from cause
    except (ModelError, *UNFIT) as cause:
        if splitter.decodes and splitter.config.decoder_start_token_id is None:
            raise make_refusal(splitter.spec, _NO_START) from cause
        if splitter.spec.model_class and isinstance(cause, ModelError):
            raise make_refusal(splitter.spec, str(cause)) from cause
        raise make_refusal(splitter.spec, _NOT_APART) from cause
