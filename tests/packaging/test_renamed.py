"""Import paths of the last release still work, and say where to go."""

from __future__ import annotations

import importlib
import subprocess
import sys
from inspect import ismodule

import pytest

from collapipe_flwr import renamed

MODULES = sorted(renamed.table())


@pytest.mark.parametrize("module", MODULES)
def test_every_old_name_is_found_at_its_new_place(module: str) -> None:
    old = importlib.import_module(module)
    for name, target in renamed.table()[module].items():
        place, _, now = target.partition(":")
        with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now {place}.{now}"):
            found = getattr(old, name)
        assert found is getattr(importlib.import_module(place), now)


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    gone = importlib.import_module("collapipe_flwr.rpc.texts")
    with pytest.raises(AttributeError, match=r"collapipe_flwr.rpc.texts.* has no attribute 'nope'"):
        _ = gone.nope
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("collapipe_flwr.rpc.nope")


def test_modules_that_lost_a_name_are_otherwise_as_before() -> None:
    script = (
        "import inspect, collapipe_flwr.core.domain as domain\n"
        "assert 'class ClusterPlan' in inspect.getsource(domain)\n"
        "from collapipe_flwr.core.domain import ClusterPlan, HopPlan\n"
        "print(HopPlan.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "LinkConfig"


def test_no_old_name_hides_a_new_one() -> None:
    for module, names in renamed.table().items():
        if importlib.util.find_spec(module).origin is not None:  # type: ignore[union-attr]
            there = vars(importlib.import_module(module)).items()
            # An old module that was imported is an attribute of its package, too.
            assert not set(names) & {name for name, value in there if not ismodule(value)}
