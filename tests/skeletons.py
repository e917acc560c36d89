"""Each model's skeleton is built once and copied from then on: many runs cut the same model.

Import `skeletons_are_copied` in the conftest of a folder whose tests are about something else.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from collapipe_flwr.models.skeleton import build_skeleton
from collapipe_flwr.models.spec import ModelSpec

_built: dict[ModelSpec, PreTrainedModel] = {}
_building = threading.Lock()


def copied_skeleton(spec: ModelSpec) -> PreTrainedModel:
    """What `build_skeleton` returns, in a tenth of its time from the second call on."""
    with _building:
        if spec not in _built:
            _built[spec] = build_skeleton(spec)
        with unset_fake_temporarily():
            return _copied(_built[spec])


def _copied(model: PreTrainedModel) -> PreTrainedModel:
    """As `deepcopy`, which is slow where modules have dictionaries of hooks that are empty.

    Parameters on the meta device are the same ones: nobody can write to them.
    """
    modules = list(model.modules())
    memo: dict[int, Any] = {id(module): type(module).__new__(type(module)) for module in modules}
    memo |= {id(p): p for p in model.parameters() if p.is_meta}
    for module in modules:
        vars(memo[id(module)]).update({k: _value(v, memo) for k, v in vars(module).items()})
    return memo[id(model)]


def _value(value: Any, memo: dict[int, Any]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict) and not value:
        return type(value)()
    return copy.deepcopy(value, memo)


@pytest.fixture(scope="module", autouse=True)
def skeletons_are_copied() -> Iterator[None]:
    """For `Splitter`, which builds one for itself and one for every part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collapipe_flwr.models.splitter.build_skeleton", copied_skeleton)
        yield
