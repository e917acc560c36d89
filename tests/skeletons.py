"""Each model is profiled once, and its skeleton built once and copied: many runs cut the same.

Import the fixtures in the conftest of a folder whose tests are about something else.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.profile import StateBytes, adamw_bytes, profile_model
from collapipe_flwr.models.skeleton import build_skeleton
from collapipe_flwr.models.spec import BatchShape, ModelSpec

_built: dict[ModelSpec, PreTrainedModel] = {}
_building = threading.Lock()
_profiles: dict[tuple[str, BatchShape, int], ModelProfile] = {}


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


def profile_once(
    splitter: AnySplitter, shape: BatchShape, optimizer_bytes: StateBytes = adamw_bytes
) -> ModelProfile:
    """As `profile_model`: costs follow from model, shape and optimizer alone."""
    trained = {k: s for k, s in splitter.shapes.items() if k not in splitter.constant_keys}
    key = (splitter.spec.to_json(), shape, optimizer_bytes(trained))
    if key not in _profiles:
        _profiles[key] = profile_model(splitter, shape, optimizer_bytes)
    return _profiles[key]


@pytest.fixture(scope="session", autouse=True)
def models_are_profiled_once() -> Iterator[None]:
    """For planners and sites, many of which have the same model."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("federation.client.site", "federation.planner"):
            patch.setattr(f"collapipe_flwr.{module}.profile_model", profile_once)
        yield
