"""Law: frozen weights in nf4 compute as transformers, bitsandbytes and peft do on one machine."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.lora import key_of, quantize
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.saving import save_adapter, save_whole
from collapipe_flwr.models.spec import BatchShape, LoraConfig
from collapipe_flwr.models.splitter import Splitter
from tests.closeness import assert_near, near
from tests.models.conftest import OVERRIDES
from tests.models.test_lora import moved
from tests.models.test_own_models import CALM, by_hand, cut_up
from tests.rounds import SGD, Cut, train_split
from tests.skeletons import skeletons_are_copied  # noqa: F401
from tests.thorough import few

bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra nf4")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
LORA = LoraConfig(rank=2, alpha=8, target_modules=("all-linear",), frozen_dtype="nf4")
KINDS = ("llama", "gemma3_text", "phi3", "qwen3", "smollm3", "olmo2", "lfm2")
PREFIX = "base_model.model."
# Rows of whole blocks: bitsandbytes 0.50 widens others wrongly on CPUs with AVX-512.
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "n_embd": 64}


def checkpoint(tiny: Any, model_type: str, folder: Path) -> str:
    """A random model in bfloat16, so that its tables lose nothing."""
    sizes = tuple((key, WIDE[key]) for key in OVERRIDES[model_type] if key in WIDE)
    spec = tiny.spec(model_type, "causal-lm", sizes=sizes)
    weights = Splitter(spec).initial_weights(seed=1)
    save_whole(spec, {k: t.bfloat16().float() for k, t in weights.items()}, folder / "base")
    return str(folder / "base")


def describe(base: str, lora: LoraConfig | None = LORA) -> Splitter:
    return Splitter(make_spec("causal-lm", pretrained=base, lora=lora))


def load_whole(splitter: Splitter, weights: dict[str, Tensor], folder: Path) -> Any:
    """The unsplit model as everybody fine-tunes it in 4 bits, with the same adapters."""
    from peft import PeftModel  # slow; other workers do without

    save_adapter(splitter.spec, weights, folder)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = AutoModelForCausalLM.from_pretrained(
            splitter.spec.pretrained, quantization_config=settings, dtype=torch.float32
        )
        return PeftModel.from_pretrained(base, str(folder), is_trainable=True)


@pytest.mark.parametrize(
    ("model_type", "adamw"),
    [
        ("llama", True),
        ("gpt2", True),
        *few([(kind, False) for kind in KINDS], 0, 1, 2),
    ],
)
def test_steps_equal_those_of_the_unsplit_model_in_4_bits(
    model_type: str, adamw: bool, tiny: Any, tmp_path: Path
) -> None:
    splitter = describe(checkpoint(tiny, model_type, tmp_path))
    weights = moved(splitter.initial_weights(seed=3))
    whole = load_whole(splitter, weights, tmp_path / "adapter")
    batch = tiny.batch(model_type, "causal-lm")
    size = len(batch["input_ids"])
    cut = Cut(stops=(1, splitter.num_blocks), micro_batches=(1, size - 1))
    steps = [batch] * (3 if adamw else 1)  # a step of SGD tells the gradients
    pieces = [cut_up(step, cut.micro_batches) for step in steps]
    losses, trained = train_split(splitter, weights, cut, pieces, CALM if adamw else SGD)
    expected = by_hand(whole, lambda model, step: model(**step, use_cache=False).loss, steps, adamw)
    assert losses == near(tuple(expected))
    learnt = {
        key_of(name.removeprefix(PREFIX)): parameter.detach()
        for name, parameter in whole.named_parameters()
        if parameter.requires_grad
    }
    assert set(trained) == set(learnt) == set(splitter.all_keys())
    assert_near(trained, learnt)
    assert any(float((trained[key] - weights[key]).abs().max()) > 1e-4 for key in trained)


def test_rounding_in_chunks_gives_the_bits_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So every machine that rounds a checkpoint by itself has the same weights."""
    values = bitsandbytes.functional.get_4bit_type("nf4", device="cpu")
    for size in ((70, 48), (33, 6), (20, 64)):  # the second ends amid a block
        weight = torch.randn(size, generator=torch.Generator().manual_seed(1))
        codes, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        given = torch.randn(3, size[1], requires_grad=True)
        halves = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()[: weight.numel()]
        scales = state.absmax.repeat_interleave(64)[: weight.numel()]
        wide = (values[halves.long()] * scales).view(size)  # as the format is defined
        if size[1] == 64:
            assert torch.equal(wide, bitsandbytes.functional.dequantize_4bit(codes, state))
        expected = given @ wide.T
        (slope,) = torch.autograd.grad(expected.square().sum(), given)
        kept = []
        for chunk in (10**6, 200):
            monkeypatch.setattr("collapipe_flwr.models.lora._CHUNK", chunk)
            layer = nn.Linear(size[1], size[0], bias=False)
            quantize([layer], weight, "nf4")
            found = layer(given)
            assert_near(found, expected)
            assert_near(torch.autograd.grad(found.square().sum(), given), (slope,))
            kept.append(layer.weight.view(torch.uint8))
        assert torch.equal(*kept)
        assert torch.equal(kept[0][: codes.numel()], codes.view(-1))


def test_a_block_holds_nine_sixteenths_of_a_byte_per_weight(tiny: Any, tmp_path: Path) -> None:
    splitter = describe(checkpoint(tiny, "llama", tmp_path))
    sizes = [splitter.shapes[key][0] for key in splitter.resident_keys_of_segment(1, 2)]
    frozen = sum(size.numel() * 9 // 16 if len(size) == 2 else size.numel() * 4 for size in sizes)
    block = splitter.build_segment(1, 2, splitter.initial_weights(seed=1))
    adapters = sum(tensor.nbytes for tensor in block.state_dict().values())
    assert block.held_bytes() == frozen + adapters
    cost = profile_model(splitter, BatchShape(source_length=8)).blocks[1]
    assert cost.state_bytes == frozen + 4 * adapters


def test_tables_keep_16_bits_as_transformers_leaves_them(tiny: Any, tmp_path: Path) -> None:
    splitter = describe(checkpoint(tiny, "llama", tmp_path))
    weights = splitter.initial_weights(seed=1)
    head = splitter.build_edge(weights).model.get_output_embeddings()
    table = splitter.build_embedding(weights).model.get_input_embeddings()
    assert head.weight.dtype == table.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_checkpoint_in_4_bits_trains_as_the_unsplit_model_does(
    nested: bool, shard: str, tiny: Any, tmp_path: Path
) -> None:
    """Its codes are widened and rounded again, which changes none of them."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    plain = checkpoint(tiny, "llama", tmp_path)
    kept = AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings)
    kept.save_pretrained(tmp_path / "kept", max_shard_size=shard)
    splitter = describe(str(tmp_path / "kept"))
    weights = moved(splitter.initial_weights(seed=3))
    save_adapter(splitter.spec, weights, tmp_path / "adapter")
    from peft import PeftModel  # slow; other workers do without

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "kept", dtype=torch.float32)
    whole = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True)
    batch = tiny.batch("llama", "causal-lm")
    cut = Cut(stops=(1, splitter.num_blocks), micro_batches=(1, len(batch["input_ids"]) - 1))
    losses, trained = train_split(splitter, weights, cut, [cut_up(batch, cut.micro_batches)], SGD)
    expected = by_hand(
        whole, lambda model, step: model(**step, use_cache=False).loss, [batch], False
    )
    assert losses == near(tuple(expected))
    learnt = {
        key_of(name.removeprefix(PREFIX)): parameter.detach()
        for name, parameter in whole.named_parameters()
        if parameter.requires_grad
    }
    assert_near(trained, learnt)


def test_a_checkpoint_in_4_bits_is_read_as_it_was_rounded(tiny: Any, tmp_path: Path) -> None:
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4")
    plain = checkpoint(tiny, "llama", tmp_path)
    kept = AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings)
    kept.save_pretrained(tmp_path / "kept")
    found = describe(str(tmp_path / "kept"), None).initial_weights(seed=1)
    assert set(found) == set(describe(plain, None).initial_weights(seed=1))
    layers = {n: m for n, m in kept.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert len(layers) == 7 * kept.config.num_hidden_layers
    for name, layer in layers.items():
        wide = bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
        assert_near(found[f"{name}.weight"].bfloat16(), wide.bfloat16())
