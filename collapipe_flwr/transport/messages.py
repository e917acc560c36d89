"""Control messages: frozen dataclasses as JSON, checked field by field when they come in.

They are small and rare, so they need no generated code; tensors never travel in them.
"""

from __future__ import annotations

from typing import TypeVar

from collapipe_flwr.core.errors import ProtocolError
from collapipe_flwr.core.json_codec import from_json, to_json

Message = TypeVar("Message")
MESSAGE_BYTES = 4 * 2**20  # more than any model config needs


def encode_message(message: object) -> bytes:
    """A dataclass instance as JSON bytes."""
    return to_json(message).encode()


def decode_message(kind: type[Message], data: bytes) -> Message:
    """Read a message of type `kind`. Raises ProtocolError on anything else."""
    if len(data) > MESSAGE_BYTES:
        raise ProtocolError(f"a {kind.__name__} of {len(data)} bytes; {MESSAGE_BYTES} are allowed")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a {kind.__name__} that is not JSON: not even text") from error
    return from_json(kind, text, kind.__name__)
