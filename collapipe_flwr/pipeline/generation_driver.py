"""The control unit in generation: embeds prompts and requested tokens, and yields new tokens."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from collapipe_flwr.core.errors import LinkError, LinkTimeout, ModelError, ProtocolError
from collapipe_flwr.pipeline.compute import bring, bring_home, find_place
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.generation import (
    ASK,
    ATTENTION_MASK,
    DONE,
    INPUT_IDS,
    LATE,
    PAST,
    PROMPT,
    ROWS,
    SLOTS,
    TOKENS,
    take_frame,
)
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind, Link, Mailbox

_CAPACITY = 4096  # unread frames of one text


class TextTimeout(LinkTimeout):
    """One text timed out; the chain continues with the others."""


@dataclass(slots=True)
class _DrivenText:
    number: int
    inbox: Mailbox[Frame]
    over: threading.Event = field(default_factory=threading.Event)  # at the edge, or with the chain


class GenerationDriver:
    """Drives a chain in generation; ``generate`` may be called from ``slots`` threads at once.

    ``part`` is the embedding, which reads ``input_name``; ``cached`` says that the devices keep
    caches (decoder-only models). Frames of a text that has ended are dropped. When the chain
    fails, all present and later calls raise the same LinkError at once.
    """

    def __init__(
        self,
        part: Any,
        down: Link,
        settings: StageConfig,
        *,
        cached: bool,
        slots: int,
        input_name: str = INPUT_IDS,
    ) -> None:
        self._part = part.train(False)
        self._down = down
        self._settings = settings
        self._cached = cached
        self._input_name = input_name
        self._slots = slots
        # Guards the next three. Reentrant: the garbage collector may close a text in a thread that
        # holds it.
        self._lock = threading.RLock()
        self._texts: dict[int, _DrivenText] = {}  # by number
        self._broken: LinkError | None = None
        self._free: Mailbox[int] = Mailbox(slots, peer=f"the chain with {slots} slots")
        self._reader = threading.Thread(target=self._read, name="generation driver", daemon=True)
        down.send(
            Frame(kind=FrameKind.SERVE, scalars={SLOTS: float(slots)}),
            deadline_s=settings.deadline_s,
        )
        for number in range(slots):
            self._free.put(number, 0.0)
        self._reader.start()

    def generate(self, prompt: Tensor, settings_json: str) -> Generator[Tensor]:
        """Yield new token ids, a few (T,) at a time, for ``prompt``: ids (1, T) or other inputs.

        Waits for a free slot. Raises ModelError if the text cannot be generated, TextTimeout
        when no slot becomes free or the text is read too slowly, LinkError when the chain fails.
        Closing the iterator stops the text.
        """
        first = self._make_frame(prompt, 0, text=settings_json)
        text = self._begin()
        try:
            yield from self._yield_pieces(text, first, prompt.shape[1])
        except TextTimeout:
            raise
        except LinkError as error:
            self._break(error)
            raise
        finally:
            if not text.over.is_set():
                self._stop(text)
            with self._lock:
                del self._texts[text.number]
                if self._broken is None:
                    self._free.put(text.number + self._slots, 0.0)

    def finish(self) -> None:
        """End the generation; returns when the chain has ended."""
        self._down.send(Frame(kind=FrameKind.END), deadline_s=self._settings.deadline_s)
        self._reader.join(self._settings.deadline_s)
        if self._reader.is_alive():
            raise LinkTimeout("the chain did not end its generation in time")

    def _yield_pieces(self, text: _DrivenText, first: Frame, place: int) -> Generator[Tensor]:
        self._send(text, first)
        seen = 0  # tokens
        while True:
            frame = text.inbox.get(self._settings.deadline_s)
            if frame.text:
                raise (TextTimeout if LATE in frame.scalars else ModelError)(frame.text)
            tokens = frame.tensors[TOKENS]
            if ASK in frame.scalars:
                self._send(text, self._make_frame(tokens, place, rows=frame.tensors.get(ROWS)))
                place += tokens.shape[1]
                continue
            new = tokens[seen:] if DONE in frame.scalars else tokens
            if len(new):
                yield new
            if DONE in frame.scalars:
                return
            seen += len(tokens)

    def _begin(self) -> _DrivenText:
        """Wait for a free slot and begin a text in it."""
        try:
            number = self._free.get(self._settings.deadline_s)
        except LinkTimeout as error:
            raise TextTimeout(
                f"all {self._slots} slots were busy for {self._settings.deadline_s:g} s: try again "
                "later, or open the chain with more slots"
            ) from error
        text = _DrivenText(number, Mailbox(_CAPACITY, peer="the edge"))
        with self._lock:
            self._texts[number] = text
            if self._broken is not None:
                text.inbox.fail(self._broken)
                text.over.set()
        return text

    def _stop(self, text: _DrivenText) -> None:
        """Stop a text at the edge; if it does not end in time, the chain counts as broken."""
        try:
            self._send(text, Frame(kind=FrameKind.STOP))
            if not text.over.wait(self._settings.deadline_s):
                raise LinkTimeout(
                    f"the edge did not stop text {text.number} within "
                    f"{self._settings.deadline_s:g} s"
                )
        except LinkError as error:
            self._break(error)

    def _break(self, error: LinkError) -> None:
        """Close the chain with an error for all its stages."""
        if self._conclude(error):
            self._down.close(str(error))

    def _conclude(self, error: LinkError) -> bool:
        """End all texts and refuse new ones; returns whether this error is the first."""
        with self._lock:
            if self._broken is not None:
                return False
            self._broken = LinkError(str(error))
            self._free.fail(self._broken)
            for text in self._texts.values():
                if not text.over.is_set():  # else it is complete, and may still be read
                    text.inbox.fail(self._broken)
                    text.over.set()
            return True

    def _send(self, text: _DrivenText, frame: Frame) -> None:
        self._down.send(
            replace(frame, micro_batch=text.number), deadline_s=self._settings.deadline_s
        )

    def _make_frame(
        self, ids: Tensor, past: int, *, text: str = "", rows: Tensor | None = None
    ) -> Frame:
        inputs, carried = self._make_inputs(ids, past)
        with torch.no_grad():
            hidden = self._part(bring(inputs, find_place(self._part)))
        scalars = {PROMPT: 1.0} if past == 0 else {}
        if self._cached:
            scalars[PAST] = float(past)
        moved = {} if rows is None else {ROWS: rows}
        return Frame(
            kind=FrameKind.ACTIVATION,
            tensors={**bring_home({HIDDEN: hidden}), **carried, **moved},
            scalars=scalars,
            text=text,
        )

    def _make_inputs(
        self, ids: Tensor, past: int
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the inputs of the embedding, and the tensors sent with its output."""
        if self._input_name != INPUT_IDS:
            return {self._input_name: ids}, {}
        if not self._cached:
            mask = torch.ones_like(ids)
            return {INPUT_IDS: ids, ATTENTION_MASK: mask}, {ATTENTION_MASK: mask}
        positions = torch.arange(past, past + ids.shape[1])[None]
        carried = {INPUT_IDS: ids} if past == 0 else {}
        return {INPUT_IDS: ids, "position_ids": positions}, carried

    def _read(self) -> None:
        try:
            pause_s = self._settings.pause_s
            while (frame := take_frame(self._down, pause_s)).kind is not FrameKind.END:
                self._deliver(frame)
        except LinkError as error:
            self._break(error)
        else:
            self._conclude(LinkError("the chain has ended"))

    def _deliver(self, frame: Frame) -> None:
        """Pass a frame to its text without blocking the others."""
        if frame.kind is not FrameKind.TOKENS:
            raise ProtocolError(f"{self._down.peer} sent {frame.kind.name} while generating")
        with self._lock:
            text = self._texts.get(frame.micro_batch)
            if text is None:
                return  # it has ended, or was stopped
            try:
                text.inbox.put(frame, 0.0)
            except LinkError:  # full, or given up for that before
                text.inbox.fail(
                    TextTimeout(f"{_CAPACITY} pieces of the text lay unread: it was given up")
                )
            if DONE in frame.scalars:
                text.over.set()
