"""Text in, text out: a model, and a chain that generates its tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple

from collapipe_flwr.config.cluster_file import ClusterConfig
from collapipe_flwr.core.keys import AUTO
from collapipe_flwr.generation.backends import ServedModel, make_thread_backend, open_daemon_backend
from collapipe_flwr.generation.resilient import ResilientGenerator
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.pipeline.compute import resolve
from collapipe_flwr.transport.generation import GenerateRequest

DEADLINE_S = 120.0  # longest wait for a token, or for the peer that holds the weights
_REPLACEMENT = "\ufffd"  # what a tokenizer writes for half a character
_BYTE = "<0x"  # how the token of one byte begins, where a vocabulary falls back on bytes


class Detokenizer:
    """Decodes one text's tokens as they come, each a bounded number of times.

    The text of a token depends on its neighbors: the first one may lose its space, and a character
    may take several tokens. So a window is decoded: the tokens since text was last returned, and
    those of that text. It never begins within a run of byte tokens, which decode only as a whole.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        self.pending = ""  # text of the newest tokens that may still change
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._told = 0  # tokens of the window whose text was returned
        self._shown = 0  # characters of the window's text that were returned

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is final now; empty while a character is incomplete."""
        self._window += tokens
        decoded = self._decode()
        new = decoded[self._shown :]
        if not new or decoded.endswith(_REPLACEMENT):
            self.pending = new
            return ""
        self.pending, self._shown = "", len(decoded)
        first = self._tokenizer.convert_ids_to_tokens(self._window[self._told])
        if not str(first).startswith(_BYTE):  # None: a token without an entry in the vocabulary
            del self._window[: self._told]
            self._shown = len(self._decode())
        self._told = len(self._window)
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=self._skip)
        return text


class TextLength(NamedTuple):
    """The tokens of a prompt and of what was written, which a limit may have cut off."""

    prompt_tokens: int
    new_tokens: int
    cut_off: bool


class TextGenerator:
    """A generator of texts over a chain; several threads may call ``write`` at once."""

    def __init__(self, model: TextModel, chain: ResilientGenerator) -> None:
        self._model = model
        self._chain = chain

    def write(self, request: GenerateRequest) -> Generator[str, None, TextLength]:
        """Yield the text chunk by chunk as it is generated; return its length.

        Raises ConfigError for an empty request, DataError for an unreadable sound, ModelError for
        one that the model cannot take, LinkError when the chain breaks for good.
        """
        prompt = self._model.encode_prompt(request)
        settings_json, stops = self._model.settings_for(request, prompt.shape[1])
        shown = Detokenizer(self._model.tokenizer, skip_special_tokens=True)
        full = Detokenizer(self._model.tokenizer, skip_special_tokens=False)
        count, cut_off = 0, True
        last = ""  # as long as the longest stop string, which may be a special token
        with closing(self._chain.generate(prompt, settings_json)) as pieces:
            for new in pieces:
                tokens = new.tolist()
                count += len(tokens)
                cut_off = tokens[-1] not in self._model.end_tokens
                if text := shown.add(tokens):
                    yield text
                if stops:
                    last += full.add(tokens)
                    if any(stop in last + full.pending for stop in stops):
                        cut_off = False
                        break
                    last = last[-max(map(len, stops)) :]
        if shown.pending:
            yield shown.pending
        return TextLength(prompt.shape[1], count, cut_off)


@contextmanager
def text_generator(
    model: TextModel,
    cluster: ClusterConfig | None = None,
    *,
    devices: int = 2,
    edge_address: str = "",
    slots: int,
    deadline_s: float = DEADLINE_S,
    compute: str = AUTO,
) -> Iterator[TextGenerator]:
    """Yield a generator with blocks on a cluster's daemons and the rest at one of its edges.

    Without a cluster, ``devices`` and edge are threads of this process, connected as on one. Up to
    ``slots`` texts are generated at once; devices that are lost are left out. ``compute`` names an
    accelerator, as on the command line. Raises ConfigError without a trusted device for the blocks
    that need one, LinkError if a member cannot be reached or refuses.
    """
    served = ServedModel(
        splitter=model.splitter,
        weights=model.weights,
        slots=slots,
        deadline_s=deadline_s,
        compute=resolve(compute, "--compute"),
    )
    with ExitStack() as stack:
        if cluster is None:
            backend = make_thread_backend(served, devices)
        else:
            backend = stack.enter_context(open_daemon_backend(served, cluster, edge_address))
        yield TextGenerator(model, stack.enter_context(ResilientGenerator(backend)))
