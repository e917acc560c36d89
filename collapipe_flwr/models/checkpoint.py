"""Checkpoints of transformers: folders or hub names, read by the library's own loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from collapipe_flwr.core.errors import CheckpointMissing, ModelError
from collapipe_flwr.models.causes import first_lines
from collapipe_flwr.models.skeleton import auto_class, read_config
from collapipe_flwr.models.spec import ModelSpec

_PROBLEMS = ("missing_keys", "mismatched_keys")
_TIE_FLAGS = ("tie_word_embeddings", "share_encoder_decoder_embeddings")


def read_pretrained_config(pretrained: str) -> PreTrainedConfig:
    """The configuration of a checkpoint (folder or hub name); raises ModelError."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(pretrained)
    except (OSError, ValueError, KeyError) as cause:
        raise CheckpointMissing(
            f"cannot read the checkpoint {pretrained!r}: {first_lines(cause)}; "
            "give a folder with config.json or a hub name that this machine can reach"
        ) from cause
    if getattr(config, "quantization_config", None):
        raise ModelError(
            f"the checkpoint {pretrained!r} is quantised, and its tensors are no longer those of "
            f"a {config.model_type!r} model: name the one that it was made from"
        )
    return config


def load_checkpoint(
    spec: ModelSpec, seed: int, *, body: frozenset[str]
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """The model of ``spec.pretrained``, and which tensors it has not from there, in order.

    A head that the checkpoint lacks, or has for other classes, is drawn from ``seed``. Raises
    ModelError if the checkpoint cannot be read or lacks one of the ``body`` keys.
    """
    config = checkpoint_config(spec)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model, report = _read_checkpoint(spec, config)
    _check_complete(spec, model, report, body)
    lacking = {key for problem in _PROBLEMS for key in _keys(report, problem)}
    return model, tuple(sorted(lacking.difference(model.all_tied_weights_keys)))


def checkpoint_config(spec: ModelSpec) -> PreTrainedConfig:
    """The configuration of ``spec``, with tables tied as in its checkpoint."""
    assert spec.pretrained is not None
    config = read_config(spec)
    source = read_pretrained_config(spec.pretrained)
    for flag in _TIE_FLAGS:
        if hasattr(source, flag):
            setattr(config, flag, getattr(source, flag))
    return config


def find_untied(model: PreTrainedModel, places: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Paths whose value differs from that of the key they belong to."""
    found = model.state_dict()
    return tuple(
        path
        for key, paths in places.items()
        for path in paths
        if not torch.equal(found[path], found[key])
    )


def _read_checkpoint(
    spec: ModelSpec, config: PreTrainedConfig
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    try:
        with _without_report():
            model, report = auto_class(spec.task, config).from_pretrained(
                spec.pretrained,
                config=config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # judged by _check_complete
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as cause:
        raise ModelError(
            f"cannot load the checkpoint {spec.pretrained!r}: {first_lines(cause)}"
        ) from cause
    return model, report


@contextmanager
def _without_report() -> Iterator[None]:
    """The library's table of lacking tensors stays away: ``load_checkpoint`` tells of them."""
    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _keys(report: Mapping[str, Any], problem: str) -> list[str]:
    return [key if isinstance(key, str) else key[0] for key in report[problem]]


def _check_complete(
    spec: ModelSpec, model: PreTrainedModel, report: Mapping[str, Any], body: frozenset[str]
) -> None:
    needed = body - set(model.all_tied_weights_keys)
    for problem in _PROBLEMS:
        wrong = sorted(needed.intersection(_keys(report, problem)))
        if wrong:
            raise ModelError(
                f"the checkpoint {spec.pretrained!r} does not fit a {spec.model_type!r} model for "
                f"{spec.task!r}: {len(wrong)} {problem.split('_')[0]} tensors, first {wrong[0]!r}"
            )
