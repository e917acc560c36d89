"""Chat completions as OpenAI's clients ask for them and read them, in JSON; no HTTP here.

Unsupported fields that would change an answer are refused, never ignored.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from collapipe_flwr.core.errors import CollaPipeError, ConfigError, LinkError, ProtocolError
from collapipe_flwr.generation.text_generator import TextLength
from collapipe_flwr.transport.generation import SYSTEM, ChatMessage, GenerateRequest

Json = dict[str, Any]
Pieces = Generator[str, None, TextLength]
_SERVER_ERROR = 500
_READ = (
    *("model", "messages", "stream", "stream_options", "stop", "seed"),
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens"),
)
_IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
_ONLY: Mapping[str, tuple[Any, ...]] = {  # values that leave the answer as it is
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}


class RequestRefused(CollaPipeError):
    """A request that gets an error of this HTTP status; ``param`` is the field to blame."""

    def __init__(self, message: str, *, status: int = 400, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asks for, and how it wants to be answered."""

    generate: GenerateRequest
    stream: bool
    tell_usage: bool  # after a stream


def read_request(body: bytes, model: str) -> ChatRequest:
    """Read a request to ``model``; raises RequestRefused."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused("the body of the request is not JSON") from error
    if not isinstance(asked, dict):
        raise RequestRefused("the body of the request must be a JSON object")
    asked = {name: value for name, value in asked.items() if value is not None}
    _refuse_unsupported(asked)
    check_model(_take(asked, "model", str, ""), model)
    temperature, top_p = (_take(asked, name, float, None) for name in ("temperature", "top_p"))
    greedy = 0 in (temperature, top_p)
    limit = "max_completion_tokens" if "max_completion_tokens" in asked else "max_tokens"
    most = _take(asked, limit, int, None)
    if most is not None and most < 1:
        raise RequestRefused(f"{limit} must be at least 1, got {most}", param=limit)
    options = _take(asked, "stream_options", dict, {})
    try:
        generate = GenerateRequest(
            messages=_read_messages(asked),
            max_new_tokens=most or 0,
            sample=False if greedy else None,
            temperature=0.0 if greedy else temperature or 0.0,
            top_p=0.0 if greedy else top_p or 0.0,
            top_k=0 if greedy else _take(asked, "top_k", int, 0),
            seed=_take(asked, "seed", int, None),
            stop=_read_stop(asked),
        )
    except ConfigError as error:
        raise RequestRefused(str(error)) from error
    return ChatRequest(
        generate=generate,
        stream=_take(asked, "stream", bool, False),
        tell_usage=options.get("include_usage") is True,
    )


def check_model(asked: str, model: str) -> None:
    """Raise RequestRefused where another model is asked for than the one that answers."""
    if asked != model:
        raise RequestRefused(
            f"the model {asked!r:.80} does not exist here: ask for {model!r}",
            status=404,
            code="model_not_found",
            param="model",
        )


def _refuse_unsupported(asked: Json) -> None:
    for name, value in asked.items():
        if name in _READ or name in _IGNORED or value in _ONLY.get(name, ()):
            continue
        only = " or ".join(json.dumps(each) for each in _ONLY.get(name, ()))
        raise RequestRefused(
            f"{name} is not supported here{f' other than {only}' if only else ''}: leave it out",
            code="unsupported_parameter",
            param=name,
        )


def _take(asked: Json, name: str, kind: type, default: Any) -> Any:
    value = asked.get(name, default)
    kinds = (int, float) if kind is float else (kind,)
    if name in asked and type(value) not in kinds:
        raise RequestRefused(f"{name} must be of type {kind.__name__}", param=name)
    return value


def _read_stop(asked: Json) -> tuple[str, ...]:
    found = asked.get("stop", [])
    stops = [found] if isinstance(found, str) else found
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise RequestRefused("stop must be a string or a list of strings", param="stop")
    return tuple(stops)


def _read_messages(asked: Json) -> tuple[ChatMessage, ...]:
    found = _take(asked, "messages", list, [])
    if not found:
        raise RequestRefused("messages must be a list of at least one message", param="messages")
    return tuple(_read_message(each, f"messages[{i}]") for i, each in enumerate(found))


def _read_message(found: Any, place: str) -> ChatMessage:
    """Read a message whose content is a text, or a list of parts that are texts."""
    if not isinstance(found, dict) or not isinstance(role := found.get("role"), str):
        raise RequestRefused(f"{place} must be an object with a role", param=place)
    content = found.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [text for part in content if isinstance(text := part.get("text"), str)]
        only = len(texts) == len(content) and all(part.get("type") == "text" for part in content)
        content = "".join(texts) if only else None
    if not isinstance(content, str):
        raise RequestRefused(f"{place}.content must be text", param=f"{place}.content")
    return ChatMessage(SYSTEM if role == "developer" else role, content)


def cut_before(stops: tuple[str, ...], pieces: Pieces) -> Pieces:
    """Yield pieces up to the first of ``stops``, which is left out.

    What may be the beginning of one waits for what follows.
    """
    held, stopped = "", False
    while True:
        try:
            held += next(pieces)
        except StopIteration as end:
            if held and not stopped:
                yield held
            length: TextLength = end.value
            return length._replace(cut_off=length.cut_off and not stopped)
        if stopped:  # the rest of the token that completed it
            continue
        first = min((held.index(stop) for stop in stops if stop in held), default=None)
        stopped = first is not None
        if first is None:
            starts = (stop[:n] for stop in stops for n in range(1, len(stop)))
            first = len(held) - max((len(s) for s in starts if held.endswith(s)), default=0)
        if first:
            yield held[:first]
        held = held[first:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to one request, whole or in chunks; all of them bear its id and time."""

    model: str
    request: ChatRequest
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def complete(self, text: str, length: TextLength) -> Json:
        """Build the whole answer."""
        message = {"role": "assistant", "content": text}
        choice = {"message": message, "logprobs": None, "finish_reason": _reason(length)}
        return self._build("chat.completion", choice) | {"usage": _usage(length)}

    def begin(self) -> Json:
        """Build the first chunk."""
        return self._chunk({"role": "assistant", "content": ""})

    def add(self, text: str) -> Json:
        """Build the chunk of a piece of text."""
        return self._chunk({"content": text})

    def end(self, length: TextLength) -> list[Json]:
        """Build the last chunk, and the one of the usage where it is wanted."""
        chunks = [self._chunk({}, _reason(length))]
        if self.request.tell_usage:
            chunks.append({**chunks[0], "choices": [], "usage": _usage(length)})
        return chunks

    def _chunk(self, delta: Json, reason: str | None = None) -> Json:
        choice = {"delta": delta, "logprobs": None, "finish_reason": reason}
        told = {"usage": None} if self.request.tell_usage else {}
        return self._build("chat.completion.chunk", choice) | told

    def _build(self, kind: str, choice: Json) -> Json:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": [{"index": 0, **choice}]}


def _reason(length: TextLength) -> str:
    return "length" if length.cut_off else "stop"


def _usage(length: TextLength) -> Json:
    asked, new, _ = length
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}


def describe_model(model: str, created: int) -> Json:
    """Build the entry of a model."""
    return {"id": model, "object": "model", "created": created, "owned_by": "collapipe"}


def status_of(error: CollaPipeError) -> int:
    """Return the HTTP status of an error: the client's fault, or the cluster's for now."""
    if isinstance(error, RequestRefused):
        return error.status
    if isinstance(error, ProtocolError):
        return _SERVER_ERROR
    return 503 if isinstance(error, LinkError) else 400


def describe_error(error: CollaPipeError) -> Json:
    """Build the error object of an answer, or of a stream that breaks off."""
    kind = "server_error" if status_of(error) >= _SERVER_ERROR else "invalid_request_error"
    code, param = getattr(error, "code", ""), getattr(error, "param", "")
    said = {"message": str(error), "type": kind, "param": param or None, "code": code or None}
    return {"error": said}
