"""Sound in a file: samples of one channel, or the features that a model of speech hears."""

from __future__ import annotations

import wave
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collapipe_flwr.core.errors import DataError

_WAV_MARK, _NPY_MARK = b"RIFF", b"\x93NUMPY"
_INT16_MOST = 32768.0


def read_sound(data: bytes, rate_hz: int) -> NDArray[np.float32]:
    """The bytes of a .wav (16 bits) or .npy file: samples (N,) at ``rate_hz``.

    Two dimensions in a .npy file are features (bins, frames). Raises DataError.
    """
    if data.startswith(_WAV_MARK):
        return _read_wav(data, rate_hz)
    if data.startswith(_NPY_MARK):
        return _read_npy(data)
    raise DataError("--audio needs a .wav or .npy file; ffmpeg makes the first of anything else")


def _read_wav(data: bytes, rate_hz: int) -> NDArray[np.float32]:
    try:
        with wave.open(BytesIO(data)) as sound:
            channels, width, rate, *_ = sound.getparams()
            frames = sound.readframes(sound.getnframes())
    except (wave.Error, EOFError) as cause:
        raise DataError(f"the .wav file cannot be read: {cause}") from cause
    if rate != rate_hz or width != 2:
        raise DataError(
            f"the .wav file has {rate} Hz and {8 * width} bits, the model hears {rate_hz} Hz and "
            f"16 bits: `ffmpeg -i FILE -ar {rate_hz} -sample_fmt s16 OUT.wav` converts it"
        )
    samples = np.frombuffer(frames, dtype="<i2").reshape(-1, channels).mean(axis=1)
    return np.asarray(samples / _INT16_MOST, dtype=np.float32)


def _read_npy(data: bytes) -> NDArray[np.float32]:
    try:
        found: Any = np.load(BytesIO(data), allow_pickle=False)
        numbers = np.asarray(found, dtype=np.float32)
    except (ValueError, TypeError, EOFError, OSError) as cause:
        raise DataError(f"the .npy file cannot be read: {cause}") from cause
    if numbers.ndim not in (1, 2) or not np.isfinite(numbers).all():
        raise DataError(
            f"the .npy file must hold samples (N,) or features (bins, frames), finite ones, got "
            f"shape {numbers.shape}"
        )
    return numbers
