"""GGUF files as checkpoints: their tensors, widened, with tokenizer and chat template, in a folder.

Once converted, a device reads the tensors of its own blocks only; a GGUF file is always widened
whole by transformers.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from collapipe_flwr.core.errors import ConfigError, require
from collapipe_flwr.core.hub import silence
from collapipe_flwr.models.foreign_errors import UNFIT, translate_errors
from collapipe_flwr.models.saving import write_folder

_MAGIC = b"GGUF"


def convert_gguf(file: Path, folder: Path) -> int:
    """Write a checkpoint for `model.pretrained`, in bfloat16; return its number of weights.

    Raises ConfigError for a file or folder that does not fit, ModelError for a model that
    transformers cannot read from such a file.
    """
    _check_paths(file, folder)
    source, name = str(file.absolute().parent), file.name
    with (
        translate_errors(f"cannot convert {file}", (*UNFIT, OSError, struct.error)),
        silence(logging),
    ):
        read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
        config = AutoConfig.from_pretrained(source, gguf_file=name)
        if hasattr(config, "quantization_config"):  # it is not any more
            del config.quantization_config
        with torch.device("meta"):
            model = type(read)(config)
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        ends = dict.fromkeys((config.eos_token_id, tokenizer.eos_token_id))
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=[end for end in ends if end is not None],
            pad_token_id=tokenizer.pad_token_id,
        )
        with write_folder("checkpoint", folder) as draft:
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
    return int(model.num_parameters())


def _check_paths(file: Path, folder: Path) -> None:
    require("gguf", "gguf")
    if not file.is_file():
        raise ConfigError(f"FILE {str(file)!r} does not exist (looked for {file.absolute()})")
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"FILE {str(file)!r} is not a GGUF file, by its first bytes")
    if folder.exists():
        raise ConfigError(f"FOLDER {str(folder)!r} exists: name a new one")
