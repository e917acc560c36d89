"""`collapipe chat` and `serve` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.generation.text_generator import text_generator
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.transport.generation import ChatMessage, GenerateRequest, TextServer

LINES, NEW = ("it was", "the best of"), 4


@pytest.mark.parametrize("served", [False, True])
def test_a_chat_through_a_pipe(talker: Path, served: bool) -> None:
    options = ["--greedy", "--max-new-tokens", str(NEW), "--system", "of times"]
    with text_generator(TextModel.load(talker), devices=2, slots=1) as writer:
        said = [ChatMessage("system", "of times")]
        for line in LINES:
            said.append(ChatMessage("user", line))
            asked = GenerateRequest(messages=tuple(said), sample=False, max_new_tokens=NEW)
            said.append(ChatMessage("assistant", "".join(writer.write(asked))))
        words = "".join(f"{line}\n" for line in LINES)
        if served:
            with TextServer("127.0.0.1:0", writer.write, most=1) as server:
                told = CliRunner().invoke(app, ["chat", "--at", server.address, *options], words)
        else:
            told = CliRunner().invoke(app, ["chat", str(talker), *options], words)
    assert told.exit_code == 0, told.output
    assert told.stdout == "".join(f"{m.content}\n" for m in said if m.role == "assistant")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["chat"], "name either RUN"),
        (["chat", "/nowhere"], "no such folder"),
        (["chat", "--at", "here"], "--at: must read like"),
        (["serve", "/nowhere"], "no such folder"),
        (["serve", "/nowhere", "--host", "10.0.0.1"], "would show token and texts"),
        (["serve", "/nowhere", "--tls-cert", "a.pem"], "both --tls-cert and --tls-key"),
        (["serve", "/nowhere", "--token", " "], "--token must be printable ASCII"),
    ],
)
def test_wrong_arguments_are_one_sentence(words: list[str], sentence: str) -> None:
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 1 and sentence in str(told.exception)


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_model_without_a_chat_template_is_refused_before_it_starts(
    storyteller: Path, command: str
) -> None:
    told = CliRunner().invoke(app, [command, str(storyteller)])
    assert told.exit_code == 1 and "has a chat template" in str(told.exception)
