"""A model of speech over a cluster writes down what the unsplit model hears."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq, WhisperFeatureExtractor
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError, ModelError
from collapipe_flwr.data.tokenizer import train_tokenizer
from collapipe_flwr.generation.text_generator import text_generator
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.saving import save_whole
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.transport.generation import GenerateRequest
from tests.cluster.hosted import daemons
from tests.generation.test_backends import SEQ2SEQ, lively
from tests.generation.test_sound import npy, wav

RATE, BINS, FRAMES, NEW = 16000, 8, 40, 9
SHAPES = {"num_mel_bins": BINS, "max_source_positions": FRAMES // 2, "max_target_positions": 32}


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a model that hears one second."""
    folder = tmp_path_factory.mktemp("whisper") / "model"
    tokenizer = train_tokenizer(["the cat sat on a mat"] * 3, vocab_size=280, starts_with_bos=False)
    overrides = {k: v for k, v in SEQ2SEQ.items() if k != "max_position_embeddings"}
    spec = make_spec(
        "seq2seq",
        model_type="whisper",
        overrides={
            **overrides,
            **SHAPES,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    first = Splitter(spec).initial_weights(5)
    save_whole(spec, {k: lively(t) for k, t in first.items()}, folder)
    tokenizer.save_pretrained(folder)
    ear = WhisperFeatureExtractor(
        feature_size=BINS, chunk_length=1, hop_length=RATE // FRAMES, n_fft=RATE // FRAMES
    )
    ear.save_pretrained(folder)
    return folder.parent


def samples(seed: int) -> np.ndarray:
    chance = np.random.default_rng(seed)
    return chance.uniform(-0.9, 0.9, (RATE // 2, 1)) * np.sin(np.arange(RATE // 2) / 50)[:, None]


def unsplit(run_dir: Path, features: torch.Tensor) -> str:
    model: Any = AutoModelForSpeechSeq2Seq.from_pretrained(run_dir / "model")
    tokenizer: Any = TextModel.load(run_dir).tokenizer
    output = model.generate(features, max_new_tokens=NEW)
    text: str = tokenizer.decode(output[0], skip_special_tokens=True)
    return text


def sound(data: bytes) -> GenerateRequest:
    return GenerateRequest(sound=base64.b64encode(data).decode(), max_new_tokens=NEW)


def test_sounds_become_the_text_of_the_unsplit_model(listener: Path, tmp_path: Path) -> None:
    ear = WhisperFeatureExtractor.from_pretrained(listener / "model")
    chance = torch.Generator().manual_seed(2)
    drawn = [torch.randn(1, BINS, FRAMES, generator=chance) for _ in range(3)]
    expected = [unsplit(listener, features) for features in drawn]
    assert len(set(expected)) > 1
    files = [npy(features[0].numpy()) for features in drawn]
    model = TextModel.load(listener)
    with text_generator(model, devices=3, slots=2) as writer:
        assert ["".join(writer.write(sound(file))) for file in files] == expected
        heard = ear(samples(1)[:, 0], sampling_rate=RATE, return_tensors="pt")["input_features"]
        pieces = list(writer.write(sound(npy(samples(1)[:, 0]))))
        assert "".join(pieces) == unsplit(listener, heard)
        with pytest.raises(ModelError, match=r"lasts 2\.0 s, but the model takes at most 1 s"):
            list(writer.write(sound(npy(np.zeros(2 * RATE)))))
        with pytest.raises(ConfigError, match="transcribes speech: give --audio FILE"):
            list(writer.write(GenerateRequest(text="hello")))
    with (
        daemons(2) as (cluster, edge),
        text_generator(model, cluster, edge_address=edge, slots=1) as w,
    ):
        assert "".join(w.write(sound(files[0]))) == expected[0]
    (tmp_path / "a.wav").write_bytes(wav(samples(1)))
    words = ["--run", str(listener), "--audio", str(tmp_path / "a.wav")]
    result = CliRunner().invoke(app, ["generate", *words, "--max-new-tokens", str(NEW)])
    assert result.exit_code == 0 and result.stdout.strip(), result.output


def test_a_file_that_is_not_there(listener: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "--run", str(listener), "--audio", "/no/x.wav"])
    assert result.exit_code != 0
