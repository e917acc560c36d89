"""Versions of what a run's results depend on, found without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from platform import python_version

_NAMES = ("collapipe-flwr", "flwr", "torch", "transformers", "ray", "datasets")


def installed_versions() -> dict[str, str]:
    """Version by package; what is not installed is left out."""
    found = {name: known for name in _NAMES if (known := version_of(name))}
    return {**found, "Python": python_version()}


def version_of(name: str) -> str:
    """That of one package; empty where it is not installed, as in a bare checkout."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
