"""A conversation: what is remembered, what a stop leaves, and what pipes and terminals show."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
from collections.abc import Iterator

import pytest

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.generation.conversation import Conversation, converse
from collapipe_flwr.transport.generation import ChatMessage, GenerateRequest


def write(request: GenerateRequest) -> Iterator[str]:
    """Says who said what so far, a word at a time; some words are more than it can take."""
    for each in request.messages:
        yield f"{each.role}:{each.content} "
        if each.content == "stop":
            signal.raise_signal(signal.SIGINT)
            yield "and "
        if each.content == "twice":
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        if each.content == "break":
            raise LinkError("no device answers")
    yield f"({request.max_new_tokens})"


def conversation(system: str = "") -> Conversation:
    return Conversation(write, GenerateRequest(max_new_tokens=5), system)


def answered(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    converse(conversation())


def test_a_model_sees_all_that_was_said() -> None:
    talk = conversation("be brief")
    assert "".join(talk.ask("one")) == "system:be brief user:one (5)"
    assert "".join(talk.ask("two")).endswith("assistant:system:be brief user:one (5) user:two (5)")
    talk.reset()
    assert "".join(talk.ask("three")) == "system:be brief user:three (5)"


def test_a_stopped_answer_is_remembered_as_far_as_it_went() -> None:
    talk = conversation()
    pieces = talk.ask("one")
    next(pieces)
    pieces.close()
    assert talk.messages == (ChatMessage("user", "one"), ChatMessage("assistant", "user:one "))


def test_a_failed_answer_is_forgotten_with_its_question() -> None:
    talk = conversation()
    with pytest.raises(LinkError):
        list(talk.ask("break"))
    assert talk.messages == ()


def test_a_pipe_gets_one_answer_for_each_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered("one\n\n /reset \ntwo\n/exit\nthree\n", monkeypatch)
    assert capsys.readouterr() == ("user:one (5)\nuser:two (5)\n", "")
    with pytest.raises(LinkError):
        answered("break\none\n", monkeypatch)


def test_an_interrupt_stops_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered("stop\n/reset\nand on\n", monkeypatch)
    assert capsys.readouterr().out == "user:stop and \nuser:and on (5)\n"
    with pytest.raises(KeyboardInterrupt):
        answered("twice\n", monkeypatch)


def test_a_terminal_goes_on_after_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keyboard, terminal = pty.openpty()
    with open(terminal, closefd=True) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(keyboard, b"break\none\n\x04")
        converse(conversation())
    os.close(keyboard)
    out, err = capsys.readouterr()
    assert "user:one (5)\n" in out and out.count("> ") == 3
    assert "Ctrl-D" in err and "Error: no device answers" in err
