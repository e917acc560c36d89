"""Each model's skeleton is built once and copied from then on: many runs cut the same model.

Import `skeletons_are_copied` in the conftest of a folder whose tests are about something else.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from collapipe_flwr.models.skeleton import build_skeleton
from collapipe_flwr.models.spec import ModelSpec

_built: dict[ModelSpec, PreTrainedModel] = {}
_building = threading.Lock()


def copied_skeleton(spec: ModelSpec) -> PreTrainedModel:
    """What `build_skeleton` returns, in a third of its time from the second call on."""
    with _building:
        if spec not in _built:
            _built[spec] = build_skeleton(spec)
        with unset_fake_temporarily():
            return copy.deepcopy(_built[spec])


@pytest.fixture(scope="module", autouse=True)
def skeletons_are_copied() -> Iterator[None]:
    """For `Splitter`, which builds one for itself and one for every part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collapipe_flwr.models.splitter.build_skeleton", copied_skeleton)
        yield
