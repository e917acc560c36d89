"""A conversation with an instruct model, in a terminal or line by line through a pipe."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.transport.generation import (
    ASSISTANT,
    SYSTEM,
    USER,
    ChatMessage,
    GenerateRequest,
    Write,
)

RESET, EXIT = "/reset", "/exit"


class Conversation:
    """Questions and their answers so far; ``blank`` is what every request has."""

    def __init__(self, write: Write, blank: GenerateRequest, system: str = "") -> None:
        self._write, self._blank = write, blank
        self._first = (ChatMessage(SYSTEM, system),) if system else ()
        self.messages = self._first

    def reset(self) -> None:
        """Forget all but the system's message."""
        self.messages = self._first

    def ask(self, question: str) -> Generator[str]:
        """Yield the answer piece by piece; closing the iterator stops it.

        A stopped answer is kept as far as it went; a failed one is dropped with its question.
        """
        asked = (*self.messages, ChatMessage(USER, question))
        answer = ""
        pieces: Any = self._write(replace(self._blank, messages=asked))
        try:
            with closing(pieces):
                for piece in pieces:
                    answer += piece
                    yield piece
        except GeneratorExit:
            if not answer:
                raise
            self.messages = (*asked, ChatMessage(ASSISTANT, answer))
            raise
        self.messages = (*asked, ChatMessage(ASSISTANT, answer))


def converse(conversation: Conversation) -> None:
    """Answer every line of stdin until its end, or ``/exit``.

    In a terminal an error is printed and the conversation goes on; Ctrl-C stops the answer with the
    next token, a second one ends the command. Through a pipe, an error ends it, too.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - lets `input` edit lines and recall them
        print(f"{RESET} forgets the conversation, {EXIT} or Ctrl-D ends it", file=sys.stderr)
    while (line := _read_line(terminal)) != EXIT:
        if line == RESET:
            conversation.reset()
        elif line:
            try:
                _answer(conversation, line)
            except CollaPipeError as error:
                if not terminal:
                    raise
                print(f"Error: {error}", file=sys.stderr)


def _read_line(terminal: bool) -> str:
    """Read a line without the blanks around it; the end of the input is an exit."""
    while True:
        try:
            return input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()
            return EXIT
        except KeyboardInterrupt:
            if not terminal:
                raise
            print()


def _answer(conversation: Conversation, question: str) -> None:
    with _hear_interrupt() as stopped, closing(conversation.ask(question)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
            if stopped.is_set():
                break
        print(flush=True)


@contextmanager
def _hear_interrupt() -> Iterator[threading.Event]:
    """Yield an event that a first SIGINT sets; a second one raises KeyboardInterrupt."""
    heard = threading.Event()

    def note(*_: Any) -> None:
        if heard.is_set():
            raise KeyboardInterrupt
        heard.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)
