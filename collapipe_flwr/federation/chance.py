"""The state of the random generators that a run draws from, as JSON.

Flower samples nodes with ``random``, its privacy wrappers draw noise from numpy's global
generator, and torch's seeds whatever the app draws itself.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch

from collapipe_flwr.core.errors import RunError


def read_chance() -> str:
    """The generators as they stand."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "random": random.getstate(),
        "numpy": [str(name), np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    return json.dumps(state)


def restore_chance(text: str) -> None:
    """Set the generators; raises RunError where ``text`` is not what :func:`read_chance` gave."""
    try:
        state = json.loads(text)
        version, internal, gauss = state["random"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(tuple(state["numpy"]))
        raw = np.frombuffer(base64.b64decode(state["torch"]), dtype=np.uint8)
        torch.set_rng_state(torch.from_numpy(raw.copy()))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise RunError(f"the checkpoint's random state cannot be read: {error}") from error
