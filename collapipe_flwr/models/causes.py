"""What a foreign error means, in words for whoever runs the model.

torch speaks of tensors, which say nothing to a user: its messages stay in the log as the cause.
"""

from __future__ import annotations

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

# What the library raises for settings that it, or torch below it, can do nothing with.
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
    """The beginning of a foreign message, on one line."""
    if isinstance(cause, StrictDataclassError):  # names its validator first
        cause = cause.__cause__ or cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return " ".join(lines[:2]).rstrip(".") if lines else type(cause).__name__


def why_unfit(cause: BaseException, config: PreTrainedConfig) -> str:
    """Why the library can do nothing with ``config``, and where its settings are explained."""
    if isinstance(cause, (*_WRITTEN_FOR_USERS, StrictDataclassError)):
        return first_lines(cause)
    said = f" ({first_lines(cause)})" if isinstance(cause, AttributeError) else ""  # one it lacks
    manual = f"see {type(config).__name__} in the transformers manual"
    return f"its settings may not fit together{said}; {manual}"
