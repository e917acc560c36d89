"""A GGUF file becomes a checkpoint that says the same, or a refusal that names the way out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.core.hub import explain_no_checkpoint
from collapipe_flwr.models.checkpoint import CheckpointSource
from collapipe_flwr.models.describing import make_spec

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
from collapipe_flwr.models.gguf import convert_gguf  # noqa: E402

WIDTH, INNER, HEADS, BLOCKS = 64, 96, 4, 2
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghij", "ab", "cd"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 8-bit blocks, with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(BLOCKS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}</s>{% endfor %}")
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(WORDS), WIDTH), "output": (len(WORDS), WIDTH)}
    for block in range(BLOCKS):
        part = f"blk.{block}"
        shapes |= {f"{part}.attn_{which}": (WIDTH, WIDTH) for which in ("q", "k", "v", "output")}
        shapes |= {f"{part}.ffn_{which}": (INNER, WIDTH) for which in ("gate", "up")}
        shapes[f"{part}.ffn_down"] = (WIDTH, INNER)
    for name, shape in shapes.items():
        values = draw.normal(0, 0.05, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    norms = [f"blk.{n}.{which}" for n in range(BLOCKS) for which in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_checkpoint_computes_what_the_file_does(file: Path, tmp_path: Path) -> None:
    weights = convert_gguf(file, tmp_path / "tiny")
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.bfloat16)
    assert weights == theirs.num_parameters()
    inputs = torch.randint(0, len(WORDS), (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(ours(input_ids=inputs).logits, theirs(input_ids=inputs).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "abcd"}], tokenize=False)
    assert asked == "abcd</s>" and tokenizer.eos_token == "</s>"


def test_parts_read_their_own_tensors_from_it(file: Path, tmp_path: Path) -> None:
    convert_gguf(file, tmp_path / "tiny")
    spec = make_spec("causal-lm", pretrained=str(tmp_path / "tiny"))
    source = CheckpointSource(spec)
    assert source.read("model.layers.1.mlp.up_proj.weight").shape == (INNER, WIDTH)


def test_what_cannot_be_converted_is_said_and_nothing_is_written(
    file: Path, tmp_path: Path
) -> None:
    target = tmp_path / "new"
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04")
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(file.read_bytes()[:2000])
    for source, words in ((other, "not a GGUF file"), (tmp_path / "no.gguf", "does not exist")):
        with pytest.raises(ConfigError, match=words):
            convert_gguf(source, target)
    with pytest.raises(ModelError, match="cannot convert"):
        convert_gguf(torn, target)
    with pytest.raises(ConfigError, match="exists: name a new one"):
        convert_gguf(file, tmp_path)
    assert not target.exists()


def test_a_run_that_names_the_file_is_told_the_command(file: Path) -> None:
    assert "`collapipe convert`" in explain_no_checkpoint("model.pretrained", str(file))
