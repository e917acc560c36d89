"""Errors of transformers and torch: which to expect of unfit settings, and one sentence of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from collapipe_flwr.core.errors import CollaPipeError, ModelError

# What transformers, or torch below it, raises for settings that do not fit together.
UNFIT = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    ImportError,
    StrictDataclassError,
)
_WRITTEN_FOR_USERS = (ValueError, AssertionError, ImportError, NotImplementedError)


def first_lines(cause: BaseException) -> str:
    """Return the beginning of another library's message, on one line."""
    if isinstance(cause, StrictDataclassError):  # names its validator first
        cause = cause.__cause__ or cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") if lines else type(cause).__name__


@contextmanager
def translate_errors(what: str, kinds: tuple[type[Exception], ...] = UNFIT) -> Iterator[None]:
    """Raise ModelError for errors of these kinds: ``what`` fails, with their message."""
    try:
        yield
    except CollaPipeError:
        raise
    except kinds as cause:
        raise ModelError(f"{what}: {first_lines(cause)}") from cause


def explain_unfit(cause: BaseException, config: PreTrainedConfig) -> str:
    """Say why transformers cannot use ``config``, and where its settings are explained."""
    if isinstance(cause, (*_WRITTEN_FOR_USERS, StrictDataclassError)):
        return first_lines(cause)
    usual = vars(type(config)())
    odd = [
        f"{name}={value}"
        for name, value in vars(config).items()
        if type(value) is int and type(usual.get(name)) is int and value <= 0 < usual[name]
    ]
    said = f" ({first_lines(cause)})" if isinstance(cause, AttributeError | KeyError) else ""
    if odd:
        said = f" ({', '.join(odd)} should be above 0)"
    manual = f"see {type(config).__name__} in the transformers manual"
    return f"its settings may not fit together{said}; {manual}"
