"""Optional dependencies: where a package is missing, one sentence names the extra to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from collapipe_flwr.core.errors import ConfigError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Wrap the import of a package of extra ``name``; raises ConfigError if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _not_installed(str(error.name), name) from error


def require(module: str, name: str) -> None:
    """Raise ConfigError if ``module`` of extra ``name`` is not installed; imports nothing."""
    if find_spec(module) is None:
        raise _not_installed(module, name)


def _not_installed(module: str, name: str) -> ConfigError:
    return ConfigError(
        f"the package {module.partition('.')[0]} is not installed: "
        f"run `pip install 'collapipe-flwr[{name}]'`"
    )
