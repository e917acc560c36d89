"""Each model's skeleton is built once and copied from then on: many runs cut the same model.

Import `skeletons_are_copied` in the conftest of a folder whose tests are about something else.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from collapipe_flwr.models.skeleton import build_skeleton
from collapipe_flwr.models.spec import ModelSpec

_built: dict[ModelSpec, PreTrainedModel] = {}
_building = threading.Lock()


def copied_skeleton(spec: ModelSpec) -> PreTrainedModel:
    """What `build_skeleton` returns, in a fifth of its time from the second call on."""
    with _building:
        if spec not in _built:
            _built[spec] = build_skeleton(spec)
        with unset_fake_temporarily():
            return copy.deepcopy(_built[spec], _empty_copies(_built[spec]))


def _empty_copies(model: nn.Module) -> dict[int, object]:
    """The memo of a copy: its modules have dictionaries of hooks, nearly all of them empty."""
    held = (value for module in model.modules() for value in vars(module).values())
    return {id(value): type(value)() for value in held if isinstance(value, dict) and not value}


@pytest.fixture(scope="module", autouse=True)
def skeletons_are_copied() -> Iterator[None]:
    """For `Splitter`, which builds one for itself and one for every part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collapipe_flwr.models.splitter.build_skeleton", copied_skeleton)
        yield
