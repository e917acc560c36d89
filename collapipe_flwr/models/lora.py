"""Low-rank adapters by peft, and weight-only quantization of the frozen matrices beneath them.

Adapters are put into skeletons, so that every part gets those of its own blocks. peft wraps the
layers that it adapts; ``key_of`` undoes that in names. Weights thus keep the library's own keys,
and adapters have the names under which peft saves them.

bfloat16 halves the memory of a frozen layer, int8 (a scale per row) quarters it, nf4 (by
bitsandbytes, a scale per 64 weights) leaves 9/64. The products run in the precision of their
inputs, so this saves memory, not time. The only error is the rounding of the weights: none if the
checkpoint itself has that precision.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from collapipe_flwr.core.errors import ModelError, name_extra, prefix_errors
from collapipe_flwr.models.foreign_errors import translate_errors
from collapipe_flwr.models.products import Adapter
from collapipe_flwr.models.spec import ModelSpec

ALL_LINEAR = "all-linear"
PEFT_PREFIX = "base_model.model."  # of names in a PeftModel, and in files of adapters
_TASK_TYPES = {
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "causal-lm": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
}
_WRAPPED = re.compile(  # with the name of the adapter, which peft does not save either
    r"\.base_layer(?=\.)|\.modules_to_save\.[^.]+(?=\.)|(?<=\.lora_[AB])\.[^.]+(?=\.)"
    r"|(?<=\.lora_embedding_[AB])\.[^.]+$|(?<=\.lora_magnitude_vector)\.[^.]+\.weight$"
)
_ADAPTER = re.compile(r"\.lora_((embedding_)?[AB]|magnitude_vector)(\.|$)")
_UNFIT = "the adapters of the model cannot be made here"
_KEPT_ORIGINAL = ".original_module."


def key_of(path: str) -> str:
    """Return the key of the tensor at ``path``: its name without peft's wrappers."""
    return _WRAPPED.sub("", path)


def is_superseded(path: str) -> bool:
    """Return whether the tensor at ``path`` is the original of one that peft trains in full."""
    return _KEPT_ORIGINAL in path


def is_adapter(key: str) -> bool:
    """Return whether a key names an adapter's tensor."""
    return _ADAPTER.search(key) is not None


def add_adapters(model: PreTrainedModel, spec: ModelSpec, *, on_meta: bool = True) -> Any:
    """Wrap the targeted layers of a model in place; returns peft's own configuration.

    In a skeleton the adapters are ``on_meta`` too, elsewhere peft draws them. All parameters but
    adapters and modules to save are frozen, and modules of ``spec.frozen`` get no adapter. Raises
    ModelError if no layer is targeted, ConfigError if peft is not installed.
    """
    peft = _peft()
    if spec.lora is None:
        name, config = read_live_config(spec.adapter_json)
        with translate_errors(_UNFIT, (ValueError, TypeError)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has seen them
            peft.inject_adapter_in_model(config, model, name, low_cpu_mem_usage=on_meta)
        return config
    settings, task = spec.lora, spec.task
    named = settings.target_modules
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if named == (ALL_LINEAR,) else list(named),
        modules_to_save=list(settings.modules_to_save) or None,
        exclude_modules=sorted({key.rpartition(".")[0] for key in spec.frozen}) or None,
        task_type=_TASK_TYPES.get(task),
        inference_mode=False,
    )
    with warnings.catch_warnings():
        # peft handles the (in, out) layout of GPT-2's Conv1D, with a warning each time
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        try:
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
        except ValueError as cause:
            kinds = ("Linear", "Conv1D")
            layers = (name for name, m in model.named_modules() if type(m).__name__ in kinds)
            raise ModelError(
                f"lora.target-modules {' '.join(named)!r} name no layer of a "
                f"{model.config.model_type!r} model that can be adapted; its linear layers are "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in layers}))}"
            ) from cause
    return config


def read_live_config(adapter_json: str) -> tuple[str, Any]:
    """Return the name of a live model's adapter, and peft's configuration; raises ModelError."""
    values = json.loads(adapter_json)
    with translate_errors(_UNFIT, (ValueError, TypeError)):
        return values.pop("adapter_name"), _peft().LoraConfig(**values, inference_mode=False)


def list_adapters(model: nn.Module) -> tuple[Adapter, ...]:
    """List the pairs of factors in a model with adapters; raises ModelError for biased ones."""
    from peft.tuners.lora import LoraLayer

    found = []
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name, scale in layer.scaling.items():
            if layer.lora_bias.get(name):
                raise ModelError(
                    "lora_bias adds to the product of the factors, which alone is aggregated: "
                    "leave it out, or aggregate factors"
                )
            on_table = name in layer.lora_embedding_A
            part, end = ("lora_embedding_", "") if on_table else ("lora_", ".weight")
            a, b = (key_of(f"{path}.{part}{side}.{name}{end}") for side in "AB")
            found.append(Adapter(a=a, b=b, scale=scale, on_table=on_table))
    return tuple(found)


def find_default_targets(model_type: str) -> tuple[str, ...]:
    """Return peft's default targets for this architecture, or else all linear layers."""
    _peft()
    from peft.utils import constants

    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    targets = known.get(model_type, (ALL_LINEAR,))
    return (targets,) if isinstance(targets, str) else tuple(targets)


def find_head_modules(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the modules with parameters beside the base model: a task's own head."""
    base = model.base_model_prefix
    return tuple(
        name
        for name, child in model.named_children()
        if name != base and next(child.parameters(), None) is not None
    )


def draw_adapter(key: str, shape: torch.Size, seed: int) -> Tensor:
    """Draw an adapter's initial values from key and seed; the product of A and B is zero.

    The distributions are peft's: Kaiming-uniform A and zero B, for tables zero A and normal B.
    """
    on_table = ".lora_embedding_" in key
    if ".lora_embedding_A" in key or (not on_table and ".lora_B" in key):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=7).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    if on_table:
        return torch.randn(shape, generator=random)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=random)


def _peft() -> Any:
    # peft imports bitsandbytes, which warns of a kernel that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    with prefix_errors("lora.rank"), name_extra("lora"):
        import peft
    return peft


_INT8_MAX = 127
_NF4_BLOCK = 64  # weights with one scale, as bitsandbytes and transformers have it
_CHUNK = 2**18  # elements that are wide at a time: larger ones leave holes in the heap


class _Product(torch.autograd.Function):
    """A frozen layer's product; the backward pass widens the matrix again instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        output, start = None, 0
        for wide in _widen(layer, inputs.dtype):
            piece = inputs @ wide.T
            if len(wide) == _shape_of(layer)[0]:
                return piece
            if output is None:
                output = piece.new_empty(*inputs.shape[:-1], _shape_of(layer)[0])
            output[..., start : start + len(wide)] = piece
            start += len(wide)
        assert output is not None
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        start, total = 0, None
        for wide in _widen(ctx.layer, gradient.dtype):
            piece = gradient[..., start : start + len(wide)] @ wide
            total = piece if total is None else total.add_(piece)
            start += len(wide)
        assert total is not None
        return total, None


class _QuantizedLinear(nn.Linear):
    """A frozen linear layer."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


class _QuantizedConv1D(Conv1D):
    """A frozen layer of GPT-2, whose weight is (in, out)."""

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = _Product.apply(inputs, self)  # type: ignore[no-untyped-call]
        return output + self.bias


class _QuantizedEmbedding(nn.Embedding):
    """A frozen table, read row by row."""

    def forward(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.weight).to(torch.float32)
        scale = getattr(self, "weight_scale", None)
        return rows if scale is None else rows * functional.embedding(ids, scale)


_QUANTIZED: dict[type, type] = {
    nn.Linear: _QuantizedLinear,
    Conv1D: _QuantizedConv1D,
    nn.Embedding: _QuantizedEmbedding,
}


def can_quantize(module: nn.Module) -> bool:
    """Return whether this kind of layer can compute with a quantized weight."""
    return type(module) in _QUANTIZED or type(module) in _QUANTIZED.values()


def quantize(layers: Sequence[nn.Module], weight: Tensor, dtype: str) -> None:
    """Give a layer, or tied ones, their frozen weight in ``dtype``: bfloat16, int8 or nf4.

    Raises ConfigError for nf4 if bitsandbytes is not installed.
    """
    turned, scale = isinstance(layers[0], Conv1D), None
    if dtype == "nf4":
        weight = _round_to_nf4(weight.T if turned else weight)
    elif dtype == "int8":
        weight, scale = _round_to_int8(weight, along=0 if turned else 1)
    else:
        weight = weight.to(torch.bfloat16, copy=True)
    parameter = nn.Parameter(weight, requires_grad=False)
    for layer in layers:
        layer.__class__ = _QUANTIZED.get(type(layer), type(layer))
        layer._parameters["weight"] = parameter
        if scale is not None:
            layer.register_buffer("weight_scale", scale, persistent=False)


def _round_to_int8(weight: Tensor, along: int) -> tuple[Tensor, Tensor]:
    """Round the matrix to int8, with scales; computed in chunks for tables."""
    at_once = along == 0 or isinstance(weight, FakeTensor)
    rows = weight.shape[0] if at_once else _chunk_rows(weight.shape[1])
    # Results are allocated first: small ones between large temporaries leave holes in the heap.
    narrow = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty_like(weight.select(along, 0).unsqueeze(along), dtype=torch.float32)
    parts = (torch.split(tensor, rows) for tensor in (weight, narrow, scales))
    for piece, codes, scale in zip(*parts, strict=True):
        scale.copy_(piece.abs().amax(along, keepdim=True).float().clamp_min_(1e-12) / _INT8_MAX)
        codes.copy_((piece / scale).round_())
    return narrow, scales


def _round_to_nf4(weight: Tensor) -> Tensor:
    """Round the matrix (out, in) as bitsandbytes does, chunk by chunk.

    Codes and scales are one vector of float32, by its bytes, as model code may convert hidden
    states to the type of a layer's weight.
    """
    with prefix_errors("lora.frozen-dtype"), name_extra("nf4"):
        import bitsandbytes  # noqa: F401  it registers the operators
    round_to = torch.ops.bitsandbytes.quantize_4bit
    blocks = weight.numel() // -_NF4_BLOCK * -1
    rounded = weight.new_empty(blocks * (_NF4_BLOCK // 8 + 1), dtype=torch.float32)
    if isinstance(weight, FakeTensor):
        return rounded
    codes, scales = rounded[:-blocks].view(torch.uint8), rounded[-blocks:]
    start = 0
    for piece in torch.split(weight, _chunk_rows(weight.shape[1])):
        flat = piece.reshape(-1).float()
        flat = functional.pad(flat, (0, -len(flat) % _NF4_BLOCK))
        code, scale = round_to(flat, _NF4_BLOCK, "nf4", torch.uint8)
        end = start + len(scale)
        codes[start * _NF4_BLOCK // 2 : end * _NF4_BLOCK // 2] = code.view(-1)
        scales[start:end] = scale
        start = end
    return rounded


def _widen(layer: Any, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the matrix (out, in) of a frozen layer in ``dtype``, in chunks of rows."""
    weight, (outputs, inputs) = layer.weight, _shape_of(layer)
    if isinstance(weight, FakeTensor):  # a profile's: one product has the same costs
        yield torch.empty((), dtype=dtype).expand(outputs, inputs)
        return
    if weight.dim() == 1:  # nf4
        yield from _widen_nf4(weight, outputs, inputs, dtype)
        return
    scale = getattr(layer, "weight_scale", None)
    turned = isinstance(layer, Conv1D)
    for start in range(0, outputs, rows := _chunk_rows(inputs)):
        chunk = slice(start, start + rows)
        wide = (weight.T if turned else weight)[chunk].to(dtype)
        if scale is not None:
            wide = wide.mul_((scale.T if turned else scale)[chunk].to(dtype))
        yield wide


def _widen_nf4(weight: Tensor, outputs: int, inputs: int, dtype: torch.dtype) -> Iterator[Tensor]:
    blocks = len(weight) // (_NF4_BLOCK // 8 + 1)  # 8 codes are as large as a scale
    codes = weight[:-blocks].view(torch.uint8).view(blocks, -1)
    scales = weight[-blocks:]
    widen = torch.ops.bitsandbytes.dequantize_4bit
    for start in range(0, outputs, rows := _chunk_rows(inputs)):
        count = min(rows, outputs - start) * inputs
        first = start * inputs // _NF4_BLOCK
        held = slice(first, first - (count // -_NF4_BLOCK))
        shape = len(scales[held]), _NF4_BLOCK
        wide = widen(codes[held], scales[held], _NF4_BLOCK, "nf4", shape, dtype)
        yield wide.view(-1)[:count].view(-1, inputs)


def _shape_of(layer: Any) -> tuple[int, int]:
    """Return the size (out, in) of a layer's matrix."""
    if isinstance(layer, Conv1D):
        return layer.nf, layer.nx
    return layer.out_features, layer.in_features


def _chunk_rows(width: int) -> int:
    """Return the rows of a chunk, which holds whole blocks of nf4."""
    step = _NF4_BLOCK // math.gcd(width, _NF4_BLOCK)
    return max(_CHUNK // width // step, 1) * step
