"""Sounds in files."""

from __future__ import annotations

import wave
from io import BytesIO

import numpy as np
import pytest

from collapipe_flwr.core.errors import DataError
from collapipe_flwr.generation.text_model import read_sound


def wav(samples: np.ndarray, rate: int = 16000) -> bytes:
    out = BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(samples.shape[1])
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes((samples * 32768).astype("<i2").tobytes())
    return out.getvalue()


def npy(values: object) -> bytes:
    out = BytesIO()
    np.save(out, np.asarray(values))
    return out.getvalue()


def test_channels_of_a_wav_are_averaged() -> None:
    sound = np.stack([np.linspace(-0.5, 0.5, 9), np.full(9, 0.25)], axis=1)
    found = read_sound(wav(sound), 16000)
    np.testing.assert_allclose(found, sound.mean(axis=1), atol=1 / 32768)


def test_samples_and_features_of_a_npy() -> None:
    for values in (np.arange(5.0), np.ones((3, 4))):
        found = read_sound(npy(values), 16000)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"ID3 something", "needs a .wav or .npy file"),
        (wav(np.zeros((4, 1)), rate=8000), "ffmpeg -i FILE -ar 16000"),
        (wav(np.zeros((4, 1)))[:20], "the .wav file cannot be read"),
        (wav(np.zeros((4, 2)))[:-5], "the .wav file is cut off"),
        (npy(np.zeros((1, 2, 3))), r"got shape \(1, 2, 3\)"),
        (npy([np.nan, 0.0]), "finite samples"),
        (npy(np.zeros(4))[:30], "the .npy file cannot be read"),
    ],
)
def test_other_files_are_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_sound(data, 16000)
