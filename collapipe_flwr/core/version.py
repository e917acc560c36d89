"""The version of this package, which all machines of one deployment share."""

from __future__ import annotations

from importlib import import_module


def read_own_version() -> str:
    """Return the version of the code that runs; the package's metadata may lag behind."""
    return str(import_module("collapipe_flwr").__version__)


def explain_version(who: str, theirs: str, here: str) -> str:
    """Explain that ``who``, another machine, runs another version than ``here``, this one.

    Returns "" if both run the same; ``theirs`` is "" for a machine that did not say.
    """
    own = read_own_version()
    if theirs == own:
        return ""
    return (
        f"{who} runs {f'version {theirs}' if theirs else 'an unknown version'} of CollaPipe, and "
        f"{here} version {own}: install the same one on both"
    )
