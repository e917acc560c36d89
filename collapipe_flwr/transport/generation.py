"""Text in, text out over gRPC: whoever drives a cluster that generates serves many clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import grpc

from collapipe_flwr.config.access_control import Roster
from collapipe_flwr.core.errors import (
    CollaPipeError,
    ConfigError,
    LinkError,
    LinkTimeout,
    ProtocolError,
)
from collapipe_flwr.core.tls_files import TlsFiles
from collapipe_flwr.transport.authorizer import Authorizer, PeerBusy, PeerRefused
from collapipe_flwr.transport.bounded import call_deadline, only_message
from collapipe_flwr.transport.keepalive import server_keepalive_options
from collapipe_flwr.transport.limits import FrameLimits
from collapipe_flwr.transport.messages import decode_message, encode_message
from collapipe_flwr.transport.methods import channel_options, name_options, server_options
from collapipe_flwr.transport.tls import bind, open_channel

_SERVICE = "collapipe.Texts"
_WAITING = 16  # calls in line for a free place; more are refused at once
_LONGEST_S = 3600.0  # from a call to the end of its text


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One text to continue, translate or sum up; 0 leaves a number to the model's settings.

    ``sound`` is a .wav or .npy file in base64, for a model of speech. ``sample`` None leaves
    that to the settings too, unless a number asks for chance. A text ends behind one of ``stop``.
    """

    text: str = ""
    sound: str = ""
    max_new_tokens: int = 0
    num_beams: int = 0
    sample: bool | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int | None = None  # None: another one for every text
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        least = min(self.max_new_tokens, self.num_beams, self.temperature, self.top_k, self.top_p)
        if not (least >= 0 and self.top_p <= 1 and self.temperature < math.inf):
            raise ConfigError("numbers of a wish must be >= 0 and finite, top-p at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be >= 0 and below 2^63, got {self.seed}")
        if not all(self.stop):
            raise ConfigError("an empty stop string would end every text at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What was written since the piece before."""

    text: str


Write = Callable[[GenerateRequest], Iterator[str]]


class TextServer:
    """Serves ``write`` to ``most`` clients at once; use as a context manager.

    ``listen`` is HOST:PORT; port 0 takes a free one, which ``address`` then names. A client that
    hangs up stops its text; one that falls silent, or reads nothing, is cut off. ``roster`` says
    who may ask (None: all that the CA signed, or everybody on plain text). Raises ConfigError when
    it cannot be bound.
    """

    def __init__(
        self,
        listen: str,
        write: Write,
        *,
        most: int,
        tls: TlsFiles | None = None,
        roster: Roster | None = None,
    ) -> None:
        self._write = write
        self._gate = Authorizer(roster, on_edge=False)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="texts")
        self._server = grpc.server(
            self._pool,
            options=[
                *channel_options(FrameLimits()),
                *server_options(most + _WAITING),
                *server_keepalive_options(),
            ],
            maximum_concurrent_rpcs=most + _WAITING,
        )
        # A stream on the wire, so that a stranger's message is never read.
        handlers = {"Write": grpc.stream_stream_rpc_method_handler(self._serve)}
        generic = grpc.method_handlers_generic_handler(_SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.address = bind(self._server, listen, tls)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, give running ones ``grace_s``, then break them off."""
        self._server.stop(grace_s).wait(grace_s + 5.0)
        self._pool.shutdown(wait=True)

    def _serve(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            with self._gate.entered(context, "Write"), call_deadline(context, _LONGEST_S):
                wish = decode_message(GenerateRequest, only_message(messages, context))
                for text in self._write(wish):
                    yield encode_message(Chunk(text=text))
        except PeerRefused as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        except PeerBusy as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except ProtocolError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except LinkError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except CollaPipeError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))


class TextClient:
    """Asks a `TextServer`; use as a context manager."""

    def __init__(
        self,
        address: str,
        *,
        tls: TlsFiles | None = None,
        certificate_name: str = "",
        deadline_s: float = _LONGEST_S,
    ) -> None:
        self._peer = f"text server at {address}"
        self._deadline_s = deadline_s
        options = [*channel_options(FrameLimits()), *name_options(certificate_name)]
        self._channel = open_channel(address, tls, options)

    def write(self, wish: GenerateRequest) -> Iterator[str]:
        """The text, piece by piece; closing the iterator stops it.

        Raises ConfigError with the server's sentence for a wish that it refuses, LinkError when it
        cannot be reached or breaks off, LinkTimeout after ``deadline_s``.
        """
        call = self._channel.unary_stream(f"/{_SERVICE}/Write", None, None)
        answers = call(encode_message(wish), timeout=self._deadline_s)
        try:
            for data in answers:
                yield decode_message(Chunk, data).text
        except grpc.RpcError as error:
            raise self._translate(error) from error
        finally:
            answers.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _translate(self, error: grpc.RpcError) -> CollaPipeError:
        code, details = error.code(), error.details()
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED):
            return ConfigError(f"{self._peer} refused: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return LinkTimeout(f"{self._peer} did not finish within {self._deadline_s:g} s")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LinkError(f"{self._peer} has too many texts in line, try again later: {details}")
        return LinkError(f"{self._peer} cannot be reached or broke off: {details}")
