"""Classes and functions by import path (``my_app.task:Net``), and versions of installed packages.

Models and losses of users are sent by name, never as code. A peer may name only members of modules
that were allowed here, by ``--import`` of a daemon or by the app that runs in this process, and the
layers and models of torch.nn and transformers.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from platform import python_version
from types import FunctionType
from typing import Any

from collapipe_flwr.core.errors import ConfigError, ModelError

_LIBRARIES = ("torch.nn", "transformers")  # of these classes only
_PACKAGES = ("collapipe-flwr", "flwr", "torch", "transformers", "ray", "datasets")
_allowed: set[str] = set()


def allow(*modules: str) -> None:
    """Allow paths into these modules and those below them, and import them now.

    Raises ConfigError for one that cannot be imported.
    """
    for name in modules:
        try:
            import_module(name)
        except Exception as cause:  # of any kind: the module's code runs
            why = f"{type(cause).__name__}: {cause}"
            raise ConfigError(
                f"--import {name}: the module cannot be imported ({why}); install it here, or "
                "start this process where it can be found"
            ) from cause
        _allowed.add(name)


def load_class(path: str, base: type) -> type:
    """Return the subclass of ``base`` that a path leads to; raises ModelError."""
    found = _load(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ModelError(f"{path!r} is no class of {base.__module__}.{base.__qualname__}")
    return found


def load_function(path: str) -> Any:
    """Return the function that a path leads to; raises ModelError."""
    found = _load(path)
    if not isinstance(found, FunctionType) or is_within(found.__module__, _LIBRARIES):
        raise ModelError(f"{path!r} is no function of a module that --import names")
    return found


def load_builder(path: str, base: type) -> Any:
    """Return a subclass of ``base``, or a function that may return one; raises ModelError."""
    return load_class(path, base) if isinstance(_load(path), type) else load_function(path)


def find_path(thing: object, what: str) -> str:
    """Find the path that leads to a class or function in any process; allow its module here.

    Raises ModelError if there is none; its sentence begins with ``what`` the thing is.
    """
    name = getattr(thing, "__qualname__", "")
    module = getattr(thing, "__module__", None)
    if not isinstance(thing, (type, FunctionType)) or not module:
        raise ModelError(f"{what} must be a class or a function, got {type(thing).__name__}")
    if "<" in name or module == "__main__":
        place = "a script that is run" if module == "__main__" else "a function or lambda"
        raise ModelError(
            f"{what} {name!r} stands in {place}, where other machines cannot import it: move it "
            "to the top of a module of your app"
        )
    path = f"{module}:{name}"
    if _find_attribute(sys.modules.get(module), name) is not thing:
        raise ModelError(f"{what} {name!r} is not what {path!r} leads to: give it that name there")
    if not is_within(module, _LIBRARIES):
        _allowed.add(module)
    return path


def is_within(path: str, names: Iterable[str]) -> bool:
    """Return whether a dotted path is one of these, or leads into one of them."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def list_versions() -> dict[str, str]:
    """List the versions of the packages that a run's results depend on; nothing is imported."""
    found = {name: known for name in _PACKAGES if (known := find_version(name))}
    return {**found, "Python": python_version()}


def find_version(package: str) -> str:
    """Find the version of a package; "" if it is not installed, as in a bare checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def list_declared_names(package: str, file: str) -> tuple[str, ...]:
    """Read ``__all__`` of a file of an installed package without importing it."""
    for text in _read_sources(package, file):
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return tuple(ast.literal_eval(node.value))
    return ()


def is_spelled(text: str, package: str, files: str) -> bool:
    """Return whether some of these files of a package have a text in quotes.

    The files are not imported. Text that no file has is unknown to the package. True if there are
    no such files.
    """
    found = list(_read_sources(package, files))
    return not found or any(f'"{text}"' in source for source in found)


def list_words(package: str, files: str) -> set[str]:
    """Return all identifiers in some files of a package, which are not imported."""
    return {word for text in _read_sources(package, files) for word in re.findall(r"\w+", text)}


def _read_sources(package: str, files: str) -> Iterator[str]:
    """Yield the texts of source files in the folder of an installed package."""
    spec = find_spec(package)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).glob(files):
            yield path.read_text(encoding="utf-8")


def _load(path: str) -> object:
    module, colon, name = path.partition(":")
    if not (colon and module and name):
        raise ModelError(f"{path!r} is no import path: write it like 'my_app.task:Net'")
    allowed = (*_allowed, *_LIBRARIES)
    if not is_within(module, allowed):
        raise _explain_refusal(path, module)
    try:
        found = _find_attribute(import_module(module), name)
    except ImportError as cause:
        raise ModelError(f"{path!r} cannot be imported here: {cause}") from cause
    if found is None:
        raise ModelError(f"{path!r} leads nowhere: {module} has no {name!r} here")
    home = inspect.getmodule(found)
    if home is None or not is_within(home.__name__, allowed):
        raise _explain_refusal(path, home.__name__ if home else type(found).__module__)
    return found


def _find_attribute(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _explain_refusal(path: str, module: str) -> ModelError:
    return ModelError(
        f"{path!r} leads into {module}, which this host does not import: start it with "
        f"--import {module}"
    )
