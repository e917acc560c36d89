"""Generation of texts over gRPC, by a cluster for many clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from collapipe_flwr.config.access_control import AccessControl
from collapipe_flwr.core.errors import (
    CollaPipeError,
    ConfigError,
    LinkError,
    LinkTimeout,
    ProtocolError,
    Unreachable,
)
from collapipe_flwr.core.links import TlsFiles
from collapipe_flwr.transport.authorizer import Authorizer
from collapipe_flwr.transport.connection import Connection
from collapipe_flwr.transport.methods import (
    MESSAGE_BYTES,
    Method,
    decode_message,
    encode_message,
)
from collapipe_flwr.transport.server import Server, limit_call, take_message

WRITE = Method("Write", "texts", downloads=True, service="collapipe.Texts")
_WAITING = 16  # calls that wait for a free place; more are refused at once
_LONGEST_S = 3600.0  # from a call to the end of its text
_MOST_BEAMS, _MOST_STOPS = 64, 64  # a server's memory grows with either
_MOST_NEW_TOKENS = 1_000_000
_MOST_MESSAGES = 10_000
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
ROLES = (SYSTEM, USER, ASSISTANT)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One text to continue, translate or summarize; 0 stands for the model's own setting.

    ``sound`` is a .wav or .npy file in base64, for a model of speech. ``sample`` None stands for
    the settings too, unless a sampling number is set. A text ends after one of ``stop``.
    ``messages`` replace the text: a conversation to answer, with roles and contents, which the
    model's chat template formats.
    """

    text: str = ""
    messages: tuple[ChatMessage, ...] = ()
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
            raise ConfigError("numbers of a request must be >= 0 and finite, top-p at most 1")
        for what, found, most in (
            ("num-beams", self.num_beams, _MOST_BEAMS),
            ("max-new-tokens", self.max_new_tokens, _MOST_NEW_TOKENS),
            ("the number of stop strings", len(self.stop), _MOST_STOPS),
            ("the number of messages", len(self.messages), _MOST_MESSAGES),
        ):
            if found > most:
                raise ConfigError(f"{what} of a request must be at most {most}, got {found}")
        if wrong := next((m.role for m in self.messages if m.role not in ROLES), None):
            raise ConfigError(
                f"a message has the role {wrong!r:.40}, but known are {', '.join(ROLES)}"
            )
        if not all(map(_is_whole, (self.text, *self.stop, *(m.content for m in self.messages)))):
            raise ConfigError("a text of a request holds half a character: give it in UTF-8")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be >= 0 and below 2^63, got {self.seed}")
        if not all(self.stop):
            raise ConfigError("an empty stop string would end every text at once")


def _is_whole(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, as JSON and odd shells allow."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


Write = Callable[[GenerateRequest], Iterator[str]]


class TextServer(Server):
    """Serves ``write`` to ``most`` clients at once; see `Server` for how it listens.

    A client that hangs up stops its text; one that sends or reads nothing is cut off. ``access``
    says who may call (None: all whom the CA signed, or everybody on plain text).
    """

    def __init__(
        self,
        listen: str,
        write: Write,
        *,
        most: int,
        tls: TlsFiles | None = None,
        access: AccessControl | None = None,
    ) -> None:
        self._write = write
        self._authorizer = Authorizer(access, on_edge=False)
        answers = {WRITE: self._serve}
        super().__init__(
            listen,
            answers,
            threads=most,
            most_calls=most + _WAITING,
            most_bytes=MESSAGE_BYTES,
            strangers_bytes=_WAITING * MESSAGE_BYTES,  # a first call is the text, and may wait
            tls=tls,
        )

    def _serve(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with (
            self._authorizer.admit(context, WRITE),
            self.intake.expect(context, WRITE),
            limit_call(context, _LONGEST_S),
        ):
            try:
                request = decode_message(GenerateRequest, take_message(messages, context))
                for text in self._write(request):
                    yield encode_message(text)
            except CollaPipeError as error:
                broken = isinstance(error, LinkError) and not isinstance(error, ProtocolError)
                code = grpc.StatusCode.UNAVAILABLE if broken else grpc.StatusCode.INVALID_ARGUMENT
                context.abort(code, str(error))


class TextClient(Connection):
    """Client of a `TextServer`; use as a context manager."""

    kind = "text server"
    usual_deadline_s = _LONGEST_S

    def write(self, request: GenerateRequest) -> Iterator[str]:
        """Yield the text, chunk by chunk; closing the iterator stops it.

        Raises ConfigError with the server's sentence for a request that it refuses, LinkError when
        it cannot be reached or breaks off, LinkTimeout after ``deadline_s``.
        """
        answers = WRITE.bind(self.channel)(encode_message(request), timeout=self.deadline_s)
        try:
            for data in answers:
                yield decode_message(str, data)
        except grpc.RpcError as error:
            raise self._translate_refusal(error) from error
        finally:
            answers.cancel()

    def _translate_refusal(self, error: grpc.RpcError) -> CollaPipeError:
        code, details = error.code(), error.details()
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED):
            return ConfigError(f"{self.peer} refused: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return LinkTimeout(f"{self.peer} did not finish within {self.deadline_s:g} s")
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return LinkError(f"{self.peer} has too many texts in line, try again later: {details}")
        found = self.translate(error)
        if isinstance(found, Unreachable):
            return Unreachable(
                f"{found}; start it there by `collapipe generate --listen`, or correct --at"
            )
        return found
