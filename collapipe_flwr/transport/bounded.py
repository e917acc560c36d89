"""Calls that end: a peer that opens one and then says nothing, or reads nothing, is cut off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

_MESSAGE_S = 60.0


@contextmanager
def call_deadline(context: grpc.ServicerContext, seconds: float) -> Iterator[None]:
    """Cancel the call if the block has not ended in time."""
    timer = threading.Timer(seconds, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def only_message(messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
    """The message of a call that takes one; who does not send it is cut off."""
    with call_deadline(context, _MESSAGE_S):
        message = next(messages, None)
    if message is None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without its message")
    assert message is not None
    return message
