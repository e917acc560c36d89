"""Peak memory of every role against a client that trains the whole model, each in its own process.

What is compared is what the kernel counted as a process' largest resident size: interpreter,
libraries and mapped pages of the checkpoint included; its anonymous part stands beside it. Roles
run one after the other: each is a real stage with its optimiser, fed with frames of the right
shapes by its own process instead of its neighbours. Weights come from a checkpoint with random
values, in full training as a message would bring them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import child_environment
from collapipe_flwr.cluster.boards import BoardSetting, Cut
from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.core.memory import read_available_bytes
from collapipe_flwr.core.processes import open_lifeline
from collapipe_flwr.costs.work import PricingOptions
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape, LoraConfig, ModelSpec
from collapipe_flwr.models.splitter import Splitter

FULL, LORA = "full", "lora"
_DEADLINE_S = 900.0
_FEW_TOKENS = 1000
_SPREAD = 0.02  # of random weights
_ADAMW_COPIES = 4  # weights, gradients, two moments
_PROCESS_BYTES = 700 * 2**20  # libraries and activations, generously
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A model to cut over ``devices`` equal devices, and the batch of one step."""

    name: str
    task: str
    model_type: str
    overrides: dict[str, object]
    vocabulary: int
    narrow_on_disk: bool
    devices: int = 4
    examples: int = 8
    tokens: int = 128
    steps: int = 2
    labels: int | None = None


BERT_BASE = ModelSize(
    name="bert-12x768",
    task="sequence-classification",
    model_type="bert",
    overrides={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    vocabulary=30_522,
    narrow_on_disk=False,
    labels=4,
)
LLAMA_1B = ModelSize(
    name="llama-3.2-1b",
    task="causal-lm",
    model_type="llama",
    overrides={
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    vocabulary=128_256,
    narrow_on_disk=True,
    examples=1,
    tokens=64,
    steps=1,
)
T5_BASE = ModelSize(
    name="t5-base",
    task="seq2seq",
    model_type="t5",
    overrides={
        "d_model": 768,
        "d_ff": 3072,
        "d_kv": 64,
        "num_heads": 12,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "dropout_rate": 0.0,
    },
    vocabulary=32_128,
    narrow_on_disk=False,
)


def _llama(name: str, width: int, blocks: int, heads: int, inner: int, **more: Any) -> ModelSize:
    """A published shape of this family, or of one that is built alike."""
    overrides = {
        **LLAMA_1B.overrides,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "head_dim": 128,
        "intermediate_size": inner,
    }
    fields = {
        k: more.pop(k)
        for k in ("model_type", "vocabulary", "examples", "tokens", "devices", "steps")
        if k in more
    }
    return replace(LLAMA_1B, name=name, overrides={**overrides, **more}, **fields)


SMOLLM2 = _llama(
    "smollm2-135m",
    *(576, 30, 9, 1536),
    head_dim=64,
    num_key_value_heads=3,
    vocabulary=49_152,
    examples=4,
    tokens=128,
    devices=3,
    steps=2,
)
LLAMA_3B = _llama("llama-3.2-3b", 3072, 28, 24, 8192)
LLAMA_8B = _llama("llama-3.1-8b", 4096, 32, 32, 14_336, tie_word_embeddings=False)
QWEN_4B = _llama("qwen3-4b", 2560, 36, 32, 9728, model_type="qwen3", vocabulary=151_936)
SIZES = {
    size.name: size for size in (BERT_BASE, T5_BASE, SMOLLM2, LLAMA_1B, LLAMA_3B, QWEN_4B, LLAMA_8B)
}
ROLES = ("whole", "control-unit", "control-unit-and-edge", "device", "edge")
MODES = (FULL, LORA, f"{LORA}-bfloat16", f"{LORA}-int8", f"{LORA}-nf4")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleOrder:
    """What one process is asked to be: a role of `benchmarks.memory.role`."""

    spec_json: str
    role: str
    first_block: int = 0
    stop_block: int = 0
    devices: int = 4
    examples: int = 8
    tokens: int = 128
    steps: int = 2

    def to_json(self) -> str:
        """One argument of the process."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """One role of one model; None where the process would not fit ``--limit-gib``.

    Where the whole model would not, its peak is what its state alone needs, so that ``ratio`` is
    rather too large than too small.
    """

    model: str
    mode: str
    role: str
    peak_bytes: int | None
    whole_model_peak_bytes: int
    ratio: float | None
    needed_bytes: int  # weights, gradients and optimiser state by the profile
    message_bytes: int | None = None  # of a control unit, from the server and as much back
    edge_message_bytes: int | None = None  # the part of it that is the edge's
    peak_anonymous_bytes: int | None = None
    left_out: str = ""  # why it was not measured
    whole_model_measured: bool = True
    predicted_bytes: int | None = None  # by `collapipe profile --boards`; None: of no board
    lasting_bytes: int | None = None  # of the peak, without pages of the checkpoint's file


def measure(
    sizes: list[ModelSize],
    modes: list[str],
    folder: Path,
    limit: int,
    tick: Tick,
    roles: Collection[str] = ROLES,
) -> list[MemoryCase]:
    """The roles of every model and mode; writes checkpoints into ``folder``.

    If ``device`` is the only role, of the model only the blocks of one device are there.
    """
    cases: list[MemoryCase] = []
    for size in sizes:
        if set(roles) == {"device"}:
            size = one_stage(size)
        checkpoint = folder / size.name
        tick(f"{size.name}: random checkpoint")
        write_checkpoint(drawn_spec(size), checkpoint, narrow=size.narrow_on_disk)
        for mode in modes:
            spec = adapted_spec(size, mode, checkpoint)
            cases += _cases(size, mode, spec, limit, tick, roles)
    return cases


def one_stage(size: ModelSize) -> ModelSize:
    """The model of one of its devices: its blocks, and hardly any vocabulary."""
    layers = size.overrides.get("num_hidden_layers")
    if not isinstance(layers, int):  # the type's own number
        return size
    overrides = {**size.overrides, "num_hidden_layers": layers // size.devices}
    return replace(size, overrides=overrides, devices=1, vocabulary=_FEW_TOKENS)


def read_roles(text: str) -> list[str]:
    """``"device,edge"`` as a list; raises ConfigError for an unknown role."""
    return _read("--roles", text, ROLES)


def read_modes(text: str) -> list[str]:
    """``"full,lora"`` as a list; raises ConfigError for an unknown mode."""
    return _read("--modes", text, MODES)


def read_sizes(text: str) -> list[ModelSize]:
    """``"bert-12x768"`` as sizes; raises ConfigError for an unknown model."""
    return [SIZES[name] for name in _read("--models", text, tuple(SIZES))]


def drawn_spec(size: ModelSize) -> ModelSpec:
    """The model from scratch, its tables tied as published."""
    return make_spec(
        size.task,
        model_type=size.model_type,
        overrides=size.overrides,
        vocab_size=size.vocabulary,
        num_labels=size.labels,
        decoder_start_token_id=0 if size.task == "seq2seq" else None,
        ties="rows",
    )


def adapted_spec(size: ModelSize, mode: str, checkpoint: Path) -> ModelSpec:
    """The model of the checkpoint as ``mode`` trains it."""
    lora = None
    if mode != FULL:
        dtype = mode.partition("-")[2] or "float32"
        lora = LoraConfig(rank=8, frozen_dtype=dtype)
    return make_spec(size.task, pretrained=str(checkpoint), lora=lora)


def _cases(
    size: ModelSize,
    mode: str,
    spec: ModelSpec,
    limit: int,
    tick: Tick,
    roles: Collection[str],
) -> Iterator[MemoryCase]:
    whole, measured = 0, False
    for order, needed, predicted in _orders(size, spec):
        if order.role not in roles:
            whole = whole or needed
            continue
        label = f"{size.name} {mode}: {order.role} {order.first_block}..{order.stop_block}"
        tick(label if order.role == "device" else f"{size.name} {mode}: {order.role}")
        left_out = _misfit(needed + _PROCESS_BYTES, limit)
        peaks = None if left_out else peaks_of(order)
        peak = peaks.resident if peaks else None
        if order.role == "whole":
            whole, measured = peak or needed, peak is not None
        carried = _message(spec) if order.role.startswith("control-unit") else (None, None)
        yield MemoryCase(
            model=size.name,
            mode=mode,
            role=order.role
            if order.role != "device"
            else f"device {order.first_block}..{order.stop_block - 1}",
            peak_bytes=peak,
            whole_model_peak_bytes=whole,
            ratio=None if peak is None else peak / whole,
            needed_bytes=needed,
            message_bytes=carried[0],
            edge_message_bytes=carried[1],
            peak_anonymous_bytes=peaks.anonymous if peaks else None,
            left_out=left_out,
            whole_model_measured=measured,
            predicted_bytes=predicted,
            lasting_bytes=peaks.anonymous + peaks.files if peaks else None,
        )


def _orders(size: ModelSize, spec: ModelSpec) -> Iterator[tuple[RoleOrder, int, int | None]]:
    """Every role with the bytes of its state, and its predicted peak; the whole model first."""
    splitter = Splitter(spec)
    profile = profile_model(splitter, BatchShape(source_length=size.tokens))
    blocks = [block.state_bytes for block in profile.blocks]
    order = RoleOrder(
        spec_json=spec.to_json(),
        role="whole",
        examples=size.examples,
        tokens=size.tokens,
        steps=size.steps,
    )
    ends = profile.embedding.state_bytes, profile.decoder.state_bytes
    yield order, _whole_bytes(size, splitter), None
    message, _ = _message(spec)
    unit = replace(order, role="control-unit", devices=size.devices)
    dtype = spec.lora.frozen_dtype if spec.lora else ""
    setting = BoardSetting(frozen_dtype=dtype, length=size.tokens, size=size.examples, count=1)
    cut = Cut(profile, setting, PricingOptions())
    control_unit, head = cut.load_ends("8gb", "8gb")
    (both,) = cut.load_ends("8gb", None)
    yield unit, max(ends[0], message), control_unit.bytes
    yield replace(unit, role="control-unit-and-edge"), max(sum(ends), message), both.bytes
    each = splitter.num_blocks // size.devices
    for first in range(0, splitter.num_blocks, each):
        stop = first + each
        device = replace(order, role="device", first_block=first, stop_block=stop)
        yield device, sum(blocks[first:stop]), cut.load_segment("8gb", first, stop, 1.0).bytes
    yield replace(order, role="edge"), ends[1], head.bytes


def _message(spec: ModelSpec) -> tuple[int, int]:
    """Bytes of what a message carries, and of the edge's part of it."""
    splitter = Splitter(spec)
    shapes = splitter.shapes

    def size(keys: Iterable[str]) -> int:
        return sum(math.prod(shapes[key][0]) * shapes[key][1].itemsize for key in keys)

    carried = set(splitter.all_keys())
    return size(carried), size(carried.intersection(splitter.edge_keys()))


def _whole_bytes(size: ModelSize, splitter: Splitter) -> int:
    """State of a plain client, whose tied tables are one: frozen weights and what trains."""
    tied = Splitter(drawn_spec(size))
    weights = sum(math.prod(shape) * dtype.itemsize for shape, dtype in tied.shapes.values())
    if splitter.spec.lora is None:
        return _ADAMW_COPIES * weights
    trained = (splitter.shapes[key] for key in splitter.all_keys())
    return weights + _ADAMW_COPIES * sum(math.prod(s) * d.itemsize for s, d in trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Bytes of one process, pages of files counted in the first only."""

    resident: int
    anonymous: int
    files: int  # at the end, when the checkpoint's pages are gone


def _misfit(wanted: int, limit: int) -> str:
    """Why a process of ``wanted`` bytes is not started; empty if it may be."""
    if wanted > limit:
        return f"needs about {wanted / 2**30:.1f} GiB, --limit-gib is {limit / 2**30:g}"
    if wanted > (available := read_available_bytes()):
        return f"needs about {wanted / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"
    return ""


def peaks_of(order: RoleOrder) -> Peaks:
    """Let a process play a role to its end; raises RunError if it fails."""
    command = [sys.executable, "-m", "benchmarks.memory.role", order.to_json()]
    try:
        with open_lifeline() as stdin:
            done = subprocess.run(
                command,
                env=child_environment(),
                stdin=stdin,
                capture_output=True,
                text=True,
                timeout=_DEADLINE_S,
                check=False,
            )
    except subprocess.TimeoutExpired as cause:
        raise RunError(f"the role {order.role} took more than {_DEADLINE_S:g} s") from cause
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise RunError(f"the role {order.role} failed: {words[-1] if words else 'no word'}")
    return Peaks(**json.loads(done.stdout.splitlines()[-1]))


def _read(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} must list some of {', '.join(known)}, got {name!r}")
    return names


def write_checkpoint(spec: ModelSpec, folder: Path, *, narrow: bool) -> None:
    """Draw every tensor of ``spec``; only one shard is in memory at a time."""
    splitter = Splitter(spec)
    folder.mkdir(parents=True, exist_ok=True)
    splitter.config.save_pretrained(folder)
    blocks = range(splitter.num_blocks)
    shards = [splitter.segment_keys(block, block + 1) for block in blocks]
    shards += [splitter.embedding_keys(), splitter.edge_keys()]
    placed = {}
    random = torch.Generator().manual_seed(0)
    for number, keys in enumerate(filter(None, shards)):
        name = f"model-{number:05d}.safetensors"
        tensors = {key: _draw(splitter, key, random, narrow=narrow) for key in keys}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        placed.update(dict.fromkeys(keys, name))
    index = json.dumps({"metadata": {}, "weight_map": placed})
    (folder / "model.safetensors.index.json").write_text(index)


def _draw(splitter: Splitter, key: str, random: torch.Generator, *, narrow: bool) -> torch.Tensor:
    shape, dtype = splitter.shapes[key]
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    drawn = torch.empty(shape, dtype=torch.bfloat16 if narrow else dtype)
    return drawn.normal_(std=_SPREAD, generator=random)
