"""OpenAI's own client against a served model: its answers are those of the unsplit model."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio import Semaphore
from transformers import AutoModelForCausalLM, AutoTokenizer

from collapipe_flwr.core.errors import ConfigError, LinkError
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.generation import chat_server
from collapipe_flwr.generation.chat_server import ChatServer
from collapipe_flwr.generation.text_generator import TextLength, text_generator
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.transport.certificates import sign_all
from collapipe_flwr.transport.generation import GenerateRequest
from tests.chats import message

openai = pytest.importorskip("openai", reason="the openai client, of the extra test, is missing")

MODEL, TOKEN, NEW, WAIT_S = "talker", "a-token", 9, 60.0
TALKS = [
    [message("user", "it was the best")],
    [message("system", "of times"), message("user", "the worst")],
    [message("user", "it was"), message("assistant", "the best"), message("user", "of times")],
    [message("user", "the times it was the worst of")],
]


def client_of(url: str, token: str = TOKEN) -> Any:
    plain = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=url, api_key=token, max_retries=0, http_client=plain)


@contextmanager
def serving(write: Callable[[GenerateRequest], Any], most: int = 1) -> Iterator[Any]:
    with (
        ChatServer("127.0.0.1", 0, write, model=MODEL, token=TOKEN, most=most) as server,
        client_of(server.url) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(talker: Path) -> Iterator[Any]:
    with (
        text_generator(TextModel.load(talker), devices=2, slots=2) as writer,
        serving(writer.write, 2) as found,
    ):
        yield found


def ask(client: Any, messages: Any = TALKS[0], **options: Any) -> Any:
    options = {"max_tokens": NEW, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def text_of(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def unsplit(run_dir: Path, messages: Any, new: int = NEW) -> tuple[str, int]:
    """What the library answers by itself, and the tokens of the prompt."""
    tokenizer: Any = AutoTokenizer.from_pretrained(run_dir / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    prompt = torch.tensor([ids])
    mask = torch.ones_like(prompt)
    output = model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False)
    return tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True), len(ids)


def test_several_clients_at_once_get_the_answers_of_the_unsplit_model(
    client: Any, talker: Path
) -> None:
    with ThreadPoolExecutor(len(TALKS)) as pool:
        answers = list(pool.map(lambda talk: ask(client, talk), TALKS))
    expected = [unsplit(talker, talk) for talk in TALKS]
    assert len({text for text, _ in expected}) > 1
    assert [(text_of(a), a.usage.prompt_tokens) for a in answers] == expected
    assert {(a.choices[0].finish_reason, a.usage.completion_tokens) for a in answers} == {
        ("length", NEW)
    }


def test_a_stream_is_the_same_answer_in_pieces(client: Any, talker: Path) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    *pieces, last, usage = chunks
    texts = [chunk.choices[0].delta.content for chunk in pieces]
    expected, prompt = unsplit(talker, TALKS[0])
    assert "".join(texts) == expected and len(texts) > 3
    assert pieces[0].choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == [] and usage.usage.total_tokens == prompt + NEW
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stop_string_ends_the_answer_and_is_left_out(client: Any, talker: Path) -> None:
    whole, _ = unsplit(talker, TALKS[0])
    stop = whole[3:6]
    answer = ask(client, stop=["nowhere", stop])
    assert text_of(answer) == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < NEW
    streamed = ask(client, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == text_of(answer)


def test_chance_repeats_itself_with_a_seed(client: Any) -> None:
    chances = {"temperature": 3.0, "top_p": 0.99}
    first, again = (text_of(ask(client, seed=4, **chances)) for _ in range(2))
    assert first == again != text_of(ask(client, seed=5, **chances))


def test_the_model_is_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "many"}, "max_completion_tokens"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"extra_body": {"beard": 1}}, "beard"),
        ({"stop": [1]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [message("poet", "o")]}, None),
        ({"temperature": -1}, None),
        ({"max_tokens": 300}, None),  # more than the model has positions
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    client: Any, options: dict[str, Any], param: str | None
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refusal:
            ask(client, **{**options, "stream": stream})
        assert refusal.value.param == param
        assert refusal.value.type == "invalid_request_error"


def test_what_leaves_the_answer_as_it_is_is_accepted(client: Any) -> None:
    parts = [{"type": "text", "text": "it was "}, {"type": "text", "text": "the best"}]
    options = {"n": 1, "user": "me", "response_format": {"type": "text"}, "frequency_penalty": 0.0}
    messages = [{"role": "user", "content": parts}]
    assert text_of(ask(client, messages, **options)) == text_of(ask(client))


def test_another_model_and_a_wrong_token_and_path(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="ask for 'talker'") as refusal:
        client.chat.completions.create(model="gpt-9", messages=TALKS[0])
    assert refusal.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="it was")
    for given in ("Bearer wrong", TOKEN, ""):
        with pytest.raises(openai.AuthenticationError) as stranger:
            client.models.list(extra_headers={"Authorization": given})
        assert stranger.value.code == "invalid_api_key"


class Endless:
    """Writes until it is stopped, and notes both."""

    def __init__(self) -> None:
        self.begun, self.stopped = threading.Semaphore(0), threading.Semaphore(0)

    def write(self, request: GenerateRequest) -> Generator[str, None, TextLength]:
        del request
        self.begun.release()
        try:
            while True:
                yield "word "
        finally:
            self.stopped.release()


def knock(client: Any) -> socket.socket:
    """Ask for a whole answer, without waiting for it."""
    url = client.base_url
    body = json.dumps({"model": MODEL, "messages": TALKS[0]})
    caller = socket.create_connection((url.host, url.port))
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        *(f"Host: {url.host}", f"Authorization: Bearer {TOKEN}", f"Content-Length: {len(body)}"),
    ]
    caller.sendall("\r\n".join([*head, "", body]).encode())
    return caller


def test_an_answer_stops_when_its_client_hangs_up() -> None:
    endless = Endless()
    with serving(endless.write) as client:
        stream = ask(client, stream=True)
        next(iter(stream))
        stream.close()
        assert endless.stopped.acquire(timeout=WAIT_S)
        assert endless.begun.acquire(timeout=WAIT_S)
        with knock(client):  # sees nothing until the end
            assert endless.begun.acquire(timeout=WAIT_S)
        assert endless.stopped.acquire(timeout=WAIT_S)


def test_a_request_in_line_is_forgotten_when_its_client_hangs_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[Semaphore] = []

    def line(most: int) -> Semaphore:
        lines.append(Semaphore(most))
        return lines[0]

    monkeypatch.setattr(chat_server, "Semaphore", line)
    monkeypatch.setattr(chat_server, "MOST_WAITING", 1)
    endless = Endless()
    with serving(endless.write) as client:
        stream = ask(client, stream=True)  # has the only place
        with knock(client):
            while not lines[0].statistics().tasks_waiting:
                client.models.list()
            with pytest.raises(openai.RateLimitError) as full:
                ask(client)
            assert full.value.code == "rate_limit_exceeded"
        while lines[0].statistics().tasks_waiting:
            client.models.list()
        stream.close()
        assert endless.stopped.acquire(timeout=WAIT_S)
        assert endless.begun.acquire(blocking=False)
        assert not endless.begun.acquire(blocking=False)


@pytest.mark.parametrize("told", [0, 2])
def test_a_chain_that_breaks_for_good_is_told(told: int) -> None:
    def write(request: GenerateRequest) -> Generator[str, None, TextLength]:
        del request
        for _ in range(told):
            yield "word "
        raise LinkError("no device of the cluster answers any more")

    with serving(write) as client:
        for _ in range(2):  # its place is free again
            with pytest.raises(openai.InternalServerError, match="no device") as whole:
                ask(client)
            assert whole.value.status_code == 503
        texts = []
        with pytest.raises(openai.APIError, match="no device"):
            for chunk in ask(client, stream=True):
                texts.append(chunk.choices[0].delta.content)
        assert "".join(texts) == "word " * told


def test_a_server_that_stops_tells_its_clients() -> None:
    endless = Endless()
    server = ChatServer("127.0.0.1", 0, endless.write, model=MODEL, token=TOKEN, most=1)
    with client_of(server.url) as client, ThreadPoolExecutor(1) as pool:
        with server:
            told = pool.submit(list, ask(client, stream=True))
        with pytest.raises(openai.APIError, match="the server stops"):
            told.result(WAIT_S)
    assert endless.stopped.acquire(blocking=False)


def test_a_port_or_certificate_that_cannot_be_used(tmp_path: Path) -> None:
    def listen(port: int, tls: TlsFiles | None = None) -> ChatServer:
        write = Endless().write
        return ChatServer("127.0.0.1", port, write, model=MODEL, token=TOKEN, most=1, tls=tls)

    with listen(0) as server, pytest.raises(ConfigError, match="cannot listen there"):
        listen(int(server.url.split(":")[2].removesuffix("/v1")))
    absent = tmp_path / "absent.pem"
    with pytest.raises(ConfigError, match="--tls-cert and --tls-key cannot be used"):
        listen(0, TlsFiles(certificate=absent, key=absent))


def test_over_https(tmp_path: Path) -> None:
    signed = sign_all(tmp_path / "certs", {"control-unit": ("127.0.0.1",)})["control-unit"]
    tls = TlsFiles(certificate=signed.certificate, key=signed.key)
    trusts = ssl.create_default_context(cafile=str(signed.ca))
    with (
        ChatServer(
            "127.0.0.1", 0, Endless().write, model=MODEL, token=TOKEN, most=1, tls=tls
        ) as server,
        openai.DefaultHttpxClient(trust_env=False, verify=trusts) as web,
    ):
        client = openai.OpenAI(base_url=server.url, api_key=TOKEN, http_client=web, max_retries=0)
        assert server.url.startswith("https://")
        assert [model.id for model in client.models.list()] == [MODEL]
