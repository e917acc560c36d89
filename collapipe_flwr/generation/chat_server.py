"""Serves chat completions over HTTP, as OpenAI's clients ask for them.

An answer is generated in a thread, token by token. When its client hangs up, that stops with the
next token, and a request in line is forgotten at once.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self

from collapipe_flwr.core.errors import CollaPipeError, ConfigError, LinkError, name_extra
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.generation.chat_api import (
    ChatRequest,
    Json,
    Pieces,
    Reply,
    RequestRefused,
    check_model,
    cut_before,
    describe_error,
    describe_model,
    read_request,
    status_of,
)
from collapipe_flwr.generation.text_generator import TextLength
from collapipe_flwr.transport.generation import GenerateRequest

with name_extra("serve"):
    import uvicorn
    from anyio import (
        CancelScope,
        CapacityLimiter,
        Semaphore,
        create_task_group,
        fail_after,
        to_thread,
    )
    from anyio.abc import TaskGroup
    from starlette.applications import Starlette
    from starlette.authentication import (
        AuthCredentials,
        AuthenticationBackend,
        AuthenticationError,
        BaseUser,
        SimpleUser,
    )
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.authentication import AuthenticationMiddleware
    from starlette.requests import ClientDisconnect, HTTPConnection, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

MOST_WAITING = 16  # requests in line; more are refused at once
_MOST_CONNECTIONS = 256
_REQUEST_BYTES = 4 * 2**20
_REQUEST_S = 30.0  # within which a client must send its request
_SEND_S = 60.0  # within which it must accept a part of an answer
_STOP_S = 5  # for answers to be completed on a stop
_DONE = "[DONE]"  # the last event of a complete answer
_BEGUN, _PART = "http.response.start", "http.response.body"
_Write = Callable[[GenerateRequest], Pieces]


class ChatServer:
    """Serves the answers of ``write`` to clients with ``token``; use as a context manager.

    As many as ``most`` are generated at once. Raises ConfigError where it cannot listen, or cannot
    use the files of ``tls``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        write: _Write,
        *,
        model: str,
        token: str,
        most: int,
        tls: TlsFiles | None = None,
    ) -> None:
        self._chats = _Chats(write, model, most)
        config = uvicorn.Config(
            _build_app(self._chats, token),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_STOP_S,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        try:
            config.load()
        except OSError as error:  # those of TLS among them
            raise ConfigError(f"--tls-cert and --tls-key cannot be used: {error}") from error
        self._server = uvicorn.Server(config)
        self._socket = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://{shown}:{self._socket.getsockname()[1]}/v1"
        run = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=run, name="chat server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._chats.stopping = True
        self._server.should_exit = True
        self._thread.join()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)  # connections wait there
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there ({error.strerror}); "
            "choose another, or port 0 for a free one"
        ) from error


def _build_app(chats: _Chats, token: str) -> Starlette:
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chats.complete, methods=["POST"]),
            Route("/v1/models", chats.list_models),
            Route("/v1/models/{model:path}", chats.show_model),
        ],
        middleware=[
            Middleware(AuthenticationMiddleware, backend=_Bearer(token), on_error=_refuse_stranger)
        ],
        exception_handlers={
            HTTPException: _answer_wrong_path,
            ClientDisconnect: lambda *_: Response(status_code=400),  # which nobody reads
            CollaPipeError: lambda _, error: _answer_error(error),
            Exception: _answer_fault,
        },
    )


class _Bearer(AuthenticationBackend):
    """Lets requests in that hold the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser]:
        """Raise AuthenticationError for all others."""
        given = conn.headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, self._expected):
            raise AuthenticationError
        return AuthCredentials(), SimpleUser("client")


def _refuse_stranger(request: HTTPConnection, error: Exception) -> Response:
    del request, error
    words = "the token is missing or wrong: give the one that `collapipe serve` printed as api_key"
    answer = _answer_error(RequestRefused(words, status=401, code="invalid_api_key"))
    answer.headers["WWW-Authenticate"] = "Bearer"
    return answer


def _answer_wrong_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path}: {error.detail}; there are only chat completions"
    return _answer_error(RequestRefused(words, status=error.status_code))


def _answer_fault(request: Request, error: Exception) -> Response:
    del request, error
    words = "the server failed, and its log says how"
    return _answer_error(RequestRefused(words, status=500))


def _answer_error(error: CollaPipeError) -> Response:
    return JSONResponse(describe_error(error), status_of(error))


class _Chats:
    """The answers of one model, ``most`` at a time; others wait in line."""

    def __init__(self, write: _Write, model: str, most: int) -> None:
        self._write, self._model = write, model
        self._created = int(time.time())
        self.stopping = False  # no answer goes on, and its client is told
        self._places, self._threads = Semaphore(most), CapacityLimiter(most)

    async def list_models(self, request: Request) -> Response:
        """Tell the one model."""
        del request
        return JSONResponse(
            {"object": "list", "data": [describe_model(self._model, self._created)]}
        )

    async def show_model(self, request: Request) -> Response:
        """Tell the model that is asked for."""
        check_model(request.path_params["model"], self._model)
        return JSONResponse(describe_model(self._model, self._created))

    async def complete(self, request: Request) -> ASGIApp:
        """Read and admit a request; return the app that sends its answer. Raises RequestRefused."""
        asked = read_request(await _read_body(request), self._model)
        if self._places.statistics().tasks_waiting >= MOST_WAITING:
            raise RequestRefused(
                "too many requests wait for an answer: try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        return partial(self._answer, asked)

    async def _answer(self, asked: ChatRequest, scope: Scope, receive: Receive, send: Send) -> None:
        async with create_task_group() as group:
            group.start_soon(_cancel_on_hang_up, receive, group)
            async with self._places:
                pieces = cut_before(asked.generate.stop, self._write(asked.generate))
                try:
                    tell = self._stream if asked.stream else self._tell
                    with suppress(TimeoutError):  # its reader sleeps: uvicorn hangs up
                        await tell(pieces, Reply(model=self._model, request=asked), scope, send)
                finally:
                    with CancelScope(shield=True):
                        await to_thread.run_sync(pieces.close, limiter=self._threads)
            group.cancel_scope.cancel()

    async def _tell(self, pieces: Pieces, reply: Reply, scope: Scope, send: Send) -> None:
        """Send the whole answer."""
        text = ""
        try:
            while isinstance(part := await self._next(pieces), str):
                text += part
            answer: Response = JSONResponse(reply.complete(text, part))
        except CollaPipeError as error:
            answer = _answer_error(error)
        await answer(scope, _never, send)

    async def _stream(self, pieces: Pieces, reply: Reply, scope: Scope, send: Send) -> None:
        """Send an answer as it is generated; an error in its midst is the last event."""
        try:
            part = await self._next(pieces)
        except CollaPipeError as error:
            await _answer_error(error)(scope, _never, send)
            return
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": _BEGUN, "status": 200, "headers": headers})
        await _send_events(send, reply.begin())
        try:
            while isinstance(part, str):
                await _send_events(send, reply.add(part))
                part = await self._next(pieces)
            await _send_events(send, *reply.end(part), _DONE, over=True)
        except CollaPipeError as error:
            await _send_events(send, describe_error(error), over=True)

    async def _next(self, pieces: Pieces) -> str | TextLength:
        if self.stopping:
            raise LinkError("the server stops: ask again when it is back")
        return await to_thread.run_sync(_take_next, pieces, limiter=self._threads)


def _take_next(pieces: Pieces) -> str | TextLength:
    try:
        return next(pieces)
    except StopIteration as end:  # which may not leave a thread
        length: TextLength = end.value
        return length


async def _read_body(request: Request) -> bytes:
    body = b""
    try:
        with fail_after(_REQUEST_S):
            async for part in request.stream():
                body += part
                if len(body) > _REQUEST_BYTES:
                    raise RequestRefused(
                        f"the request is longer than {_REQUEST_BYTES} bytes", status=413
                    )
    except TimeoutError as error:
        raise RequestRefused("the request did not arrive in time", status=408) from error
    return body


async def _cancel_on_hang_up(receive: Receive, group: TaskGroup) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    group.cancel_scope.cancel()


async def _send_events(send: Send, *events: Json | str, over: bool = False) -> None:
    """Send server-sent events; raises TimeoutError."""
    lines = (event if isinstance(event, str) else json.dumps(event) for event in events)
    data = "".join(f"data: {line}\n\n" for line in lines).encode()
    with fail_after(_SEND_S):
        await send({"type": _PART, "body": data, "more_body": not over})


async def _never() -> Any:
    raise AssertionError("an answer reads nothing")
