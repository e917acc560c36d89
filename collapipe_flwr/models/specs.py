"""Descriptions of models of any kind, by the one string that travels."""

from __future__ import annotations

import json

from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.module_spec import ModuleSpec
from collapipe_flwr.models.module_splitter import ModuleSplitter
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.splitter import Splitter


def spec_of(spec_json: str) -> ModelSpec | ModuleSpec:
    """The description that a string holds; raises ModelError."""
    try:
        values = json.loads(spec_json)
    except (ValueError, RecursionError):
        values = None  # told by the other kind
    is_module = isinstance(values, dict) and "build" in values
    return ModuleSpec.from_json(spec_json) if is_module else ModelSpec.from_json(spec_json)


def splitter_of(spec_json: str) -> AnySplitter:
    """The splitter of a model of any kind; raises ModelError."""
    spec = spec_of(spec_json)
    return ModuleSplitter(spec) if isinstance(spec, ModuleSpec) else Splitter(spec)
