"""The control unit's share of generation: embeds prompts, answers the edge, hands tokens out."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor

from collapipe_flwr.core.errors import LinkError, LinkTimeout, ModelError
from collapipe_flwr.pipeline.frame import HIDDEN, Frame, FrameKind
from collapipe_flwr.pipeline.generation import (
    ASK,
    ATTENTION_MASK,
    DONE,
    INPUT_IDS,
    PAST,
    PROMPT,
    ROWS,
    SLOTS,
    TOKENS,
)
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.mailbox import Mailbox
from collapipe_flwr.pipeline.stage_settings import StageSettings

_CAPACITY = 4096  # frames of one slot that nobody has read yet


class SlotsBusy(LinkTimeout):
    """The chain works, but for others."""


class Prompter:
    """Drives a chain in generation; ``generate`` may be called from ``slots`` threads at once.

    ``part`` is the embedding, which reads ``input_name``; ``cached`` says that the devices keep
    caches (decoder-only models).
    """

    def __init__(
        self,
        part: Any,
        down: Link,
        settings: StageSettings,
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
        self._inboxes: dict[int, Mailbox[Frame]] = {}
        self._broken: LinkError | None = None
        self._free: Mailbox[int] = Mailbox(slots, peer=f"the chain with {slots} slots")
        self._reader = threading.Thread(target=self._read, name="prompter", daemon=True)
        down.send(
            Frame(kind=FrameKind.SERVE, scalars={SLOTS: float(slots)}),
            deadline_s=settings.deadline_s,
        )
        for slot in range(slots):
            self._free.put(slot, settings.deadline_s)
        self._reader.start()

    def generate(self, prompt: Tensor, settings_json: str) -> Generator[Tensor]:
        """New token ids, a few (T,) at a time, for the ids (1, T), or what else the model reads.

        Waits for a free slot. Raises ModelError where the text cannot be generated, SlotsBusy
        when no slot comes free, LinkError when the chain breaks. Closing the iterator stops it.
        """
        slot = self._take_slot()
        inbox: Mailbox[Frame] = Mailbox(_CAPACITY, peer="the edge")
        self._inboxes[slot] = inbox
        if self._broken is not None:
            inbox.fail(self._broken)
        over = False
        try:
            self._send(slot, prompt, 0, text=settings_json)
            told, place = 0, prompt.shape[1]
            while not over:
                frame = inbox.get(self._settings.deadline_s)
                if frame.text:
                    over = True
                    raise ModelError(frame.text)
                tokens = frame.tensors[TOKENS]
                if ASK in frame.scalars:
                    self._send(slot, tokens, place, rows=frame.tensors.get(ROWS))
                    place += tokens.shape[1]
                    continue
                over = DONE in frame.scalars
                new = tokens[told:] if over else tokens
                told += 0 if over else len(tokens)
                if len(new):
                    yield new
        finally:
            if not over:
                self._abandon(slot, inbox)
            self._free.put(slot, self._settings.deadline_s)

    def _take_slot(self) -> int:
        try:
            return self._free.get(self._settings.deadline_s)
        except LinkTimeout as error:
            raise SlotsBusy(
                f"all {self._slots} slots were busy for {self._settings.deadline_s:g} s: try again "
                "later, or open the chain with more slots"
            ) from error

    def finish(self) -> None:
        """No further text; returns when the chain has ended."""
        self._down.send(Frame(kind=FrameKind.END), deadline_s=self._settings.deadline_s)
        self._reader.join(self._settings.deadline_s)
        if self._reader.is_alive():
            raise LinkTimeout("the chain did not end its generation in time")

    def _send(
        self, slot: int, ids: Tensor, past: int, *, text: str = "", rows: Tensor | None = None
    ) -> None:
        inputs, carried = self._inputs(ids, past)
        with torch.no_grad():
            hidden = self._part(inputs)
        scalars = {PROMPT: 1.0} if past == 0 else {}
        if self._cached:
            scalars[PAST] = float(past)
        frame = Frame(
            kind=FrameKind.ACTIVATION,
            micro_batch=slot,
            tensors={HIDDEN: hidden, **carried, **({} if rows is None else {ROWS: rows})},
            scalars=scalars,
            text=text,
        )
        self._down.send(frame, deadline_s=self._settings.deadline_s)

    def _inputs(self, ids: Tensor, past: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What the embedding reads, and what travels with its output."""
        if self._input_name != INPUT_IDS:
            return {self._input_name: ids}, {}
        if not self._cached:
            mask = torch.ones_like(ids)
            return {INPUT_IDS: ids, ATTENTION_MASK: mask}, {ATTENTION_MASK: mask}
        positions = torch.arange(past, past + ids.shape[1])[None]
        carried = {INPUT_IDS: ids} if past == 0 else {}
        return {INPUT_IDS: ids, "position_ids": positions}, carried

    def _abandon(self, slot: int, inbox: Mailbox[Frame]) -> None:
        """Stop a text that nobody reads; the slot is free when the edge has let go of it."""
        try:
            self._down.send(
                Frame(kind=FrameKind.STOP, micro_batch=slot), deadline_s=self._settings.deadline_s
            )
            while DONE not in inbox.get(self._settings.deadline_s).scalars:
                pass
        except LinkError:
            return  # the chain is broken: whoever uses it next hears of it

    def _read(self) -> None:
        try:
            while (frame := self._next()).kind is not FrameKind.END:
                self._inboxes[frame.micro_batch].put(frame, self._settings.deadline_s)
        except LinkError as error:
            self._broken = error
            for inbox in list(self._inboxes.values()):
                inbox.fail(error)

    def _next(self) -> Frame:
        return self._down.receive(deadline_s=self._settings.idle_s)
