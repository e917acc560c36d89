"""The version of this package, which all machines of one deployment share."""

from __future__ import annotations

from importlib import import_module


def own_version() -> str:
    """Return the version of the code that runs; the package's metadata may lag behind."""
    return str(import_module("collapipe_flwr").__version__)


def version_fault(who: str, theirs: str, here: str) -> str:
    """Say that ``who``, another machine, runs another version than ``here``, this one.

    Empty where both run the same; ``theirs`` is empty where it did not say.
    """
    own = own_version()
    if theirs == own:
        return ""
    return (
        f"{who} runs {f'version {theirs}' if theirs else 'an unknown version'} of CollaPipe, and "
        f"{here} version {own}: install the same one on both"
    )
