"""The finished model as a folder that transformers loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from shutil import copyfile

from safetensors.torch import save_file
from torch import Tensor

from collapipe_flwr.core.durable import draft, make_folder, publish
from collapipe_flwr.models.checkpoint import find_generation_settings
from collapipe_flwr.models.foreign_errors import translate_errors
from collapipe_flwr.models.lora import PEFT_PREFIX, add_adapters, is_superseded, key_of
from collapipe_flwr.models.skeleton import build_skeleton
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.splitter import Splitter

_ADAPTER_FILE = "adapter_model.safetensors"


def save_adapter(spec: ModelSpec, weights: Mapping[str, Tensor], directory: Path | str) -> None:
    """Write a folder that ``PeftModel.from_pretrained`` puts on the model of ``spec.pretrained``.

    It holds adapters and modules trained in full, and also the frozen tensors that the checkpoint
    lacks, which loading would draw anew.
    """
    assert spec.lora is not None
    config = add_adapters(build_skeleton(spec.unadapted), spec)
    config.base_model_name_or_path = spec.pretrained
    config.inference_mode = True
    splitter = Splitter(spec)
    own = set(splitter.all_keys()) - (splitter.constant_keys - set(spec.absent))
    tensors = {f"{PEFT_PREFIX}{key}": weights[key].contiguous() for key in sorted(own)}
    with write_folder("adapter", directory) as folder:
        config.save_pretrained(str(folder))
        save_file(tensors, folder / _ADAPTER_FILE, metadata={"format": "pt"})


def save_whole(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    directory: Path | str,
    *,
    save_inputs: Callable[[Path], object] | None = None,
) -> None:
    """Write a folder that ``AutoModelFor...from_pretrained`` loads with bit-equal weights.

    Adapters are merged into the layers that they adapt. ``save_inputs`` adds the files of a
    tokenizer or preprocessor before the folder gets its name.
    """
    if spec.lora is not None:
        weights, spec = _merge_adapters(spec, weights), spec.unadapted
    model = Splitter(spec).build_whole(weights)
    with write_folder("model", directory) as folder:
        model.save_pretrained(str(folder))
        if spec.pretrained and (settings := find_generation_settings(spec.pretrained)):
            copyfile(settings, folder / settings.name)  # the configuration holds few of them
        if save_inputs is not None:
            save_inputs(folder)


@contextmanager
def write_folder(what: str, directory: Path | str) -> Iterator[Path]:
    """Yield a draft folder that becomes ``directory``, or whose files join an existing one.

    Raises ModelError when it cannot be written.
    """
    path = Path(directory).resolve()
    with translate_errors(f"cannot write the {what} to {str(directory)!r}", (OSError,)):
        make_folder(path.parent)
        with draft(path / what if path.exists() else path) as folder:
            yield folder
            if path.exists():
                for file in folder.iterdir():
                    publish(file, path / file.name)
            else:
                publish(folder, path)


def _merge_adapters(spec: ModelSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the equal model without adapters, from exact frozen weights."""
    assert spec.lora is not None
    exact = replace(spec, lora=replace(spec.lora, frozen_dtype="float32"))
    model = Splitter(exact).build_whole(weights)
    for module in model.modules():
        merge = getattr(module, "merge", None)
        if merge is not None and hasattr(module, "base_layer"):
            merge()
    found = {
        key_of(path): tensor
        for path, tensor in model.state_dict().items()
        if not is_superseded(path)
    }
    return {key: found[key] for key in Splitter(spec.unadapted).all_keys()}
