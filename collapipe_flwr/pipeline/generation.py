"""Generation over a chain of stages: several texts at once, each in a slot of its own.

    control unit   ACTIVATION: hidden states of a prompt, or of the token that was asked for   ->
    device         the same, through its blocks; a cache per slot for decoder-only models      ->
    edge           generates; TOKENS: new ones, or those whose hidden states it needs          <-

With beams a step has several rows; ROWS says which rows of the last step they go on from.

A SERVE frame turns a chain into this mode until END. Slots are numbered by ``micro_batch``. Frames
of different slots mix freely, so that while one text waits for a token the devices work on others.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from collapipe_flwr.core.errors import CollaPipeError, LinkError, ProtocolError
from collapipe_flwr.pipeline.frame import HIDDEN, Frame, FrameKind
from collapipe_flwr.pipeline.link import Link
from collapipe_flwr.pipeline.mailbox import Mailbox
from collapipe_flwr.pipeline.stage_settings import StageSettings

TOKENS, INPUT_IDS, ATTENTION_MASK, ROWS = "tokens", "input_ids", "attention_mask", "rows"
PAST, PROMPT, ASK, DONE, SLOTS = "past", "prompt", "ask", "done", "slots"
MOST_SLOTS = 64
_INBOX = 4  # frames of one slot; one waits for the other, so there are never more


def relay_generation(part: Any, up: Link, down: Link, settings: StageSettings) -> None:
    """A device's share, until END: blocks on the way down, tokens on the way up."""
    part.train(False)
    caches: dict[int, Any] = {}
    pump = threading.Thread(target=_pump, args=(down, up, settings), daemon=True)
    pump.start()
    while (frame := up.receive(deadline_s=settings.idle_s)).kind is not FrameKind.END:
        if frame.kind is FrameKind.ACTIVATION:
            frame = _through(part, caches, frame)
        elif frame.kind is not FrameKind.STOP:
            raise ProtocolError(f"{up.peer} sent {frame.kind.name} while generating")
        down.send(frame, deadline_s=settings.deadline_s)
    down.send(frame, deadline_s=settings.deadline_s)
    pump.join(settings.deadline_s)


def _through(part: Any, caches: dict[int, Any], frame: Frame) -> Frame:
    hidden = frame.tensors[HIDDEN]
    with torch.no_grad():
        if PAST not in frame.scalars:
            context = {name: t for name, t in frame.tensors.items() if name != HIDDEN}
            output = part(hidden, context)
        else:
            if PROMPT in frame.scalars:
                caches[frame.micro_batch] = part.new_cache()
            if ROWS in frame.tensors:
                caches[frame.micro_batch].reorder_cache(frame.tensors[ROWS])
            output = part.advance(hidden, caches[frame.micro_batch])
    return replace(frame, tensors={**frame.tensors, HIDDEN: output})


def _pump(down: Link, up: Link, settings: StageSettings) -> None:
    """Everything that comes up from the edge; an error goes on to who waits upstream."""
    try:
        while True:
            frame = down.receive(deadline_s=settings.idle_s)
            up.send(frame, deadline_s=settings.deadline_s)
            if frame.kind is FrameKind.END:
                return
    except LinkError as error:
        up.close(str(error))


@dataclass(slots=True)
class _Slot:
    """One text at the edge."""

    inbox: Mailbox[Frame]
    stopped: threading.Event = field(default_factory=threading.Event)


class GeneratingEdge:
    """The last stage's share: one thread per text in flight, ``slots`` of them at most."""

    def __init__(self, part: Any, up: Link, settings: StageSettings, order: Frame) -> None:
        slots = int(order.scalars.get(SLOTS, 0))
        if not 1 <= slots <= MOST_SLOTS:
            raise ProtocolError(f"a chain generates 1 .. {MOST_SLOTS} texts at once, not {slots}")
        self._part = part
        self._up = up
        self._settings = settings
        self._most = slots
        self._slots: dict[int, _Slot] = {}

    def serve(self) -> None:
        """Generate until END."""
        self._part.train(False)
        with ThreadPoolExecutor(self._most, thread_name_prefix="generate") as pool:
            try:
                while (frame := self._next()).kind is not FrameKind.END:
                    self._accept(frame, pool)
            finally:
                for slot in self._slots.values():
                    slot.stopped.set()
                    slot.inbox.fail(LinkError("the chain generates no more"))
        self._up.send(frame, deadline_s=self._settings.deadline_s)

    def _next(self) -> Frame:
        return self._up.receive(deadline_s=self._settings.idle_s)

    def _accept(self, frame: Frame, pool: ThreadPoolExecutor) -> None:
        number = frame.micro_batch
        if frame.kind is FrameKind.ACTIVATION and PROMPT in frame.scalars:
            if not 0 <= number < self._most:
                raise ProtocolError(f"{self._up.peer} used slot {number} of {self._most}")
            self._slots[number] = slot = _Slot(Mailbox(_INBOX, peer=self._up.peer))
            pool.submit(self._run, number, slot, frame)
        elif number not in self._slots:
            raise ProtocolError(f"{self._up.peer} sent {frame.kind.name} for an unused slot")
        elif frame.kind is FrameKind.STOP:
            self._slots[number].stopped.set()
            self._slots[number].inbox.fail(LinkError("nobody listens any more"))
        else:
            self._slots[number].inbox.put(frame, self._settings.deadline_s)

    def _run(self, number: int, slot: _Slot, prompt: Frame) -> None:
        """One text; what goes wrong with it is told in its last frame, the others go on."""
        try:
            tokens = self._generate(number, slot, prompt)
            self._tell(number, {TOKENS: tokens}, {DONE: 1.0})
        except CollaPipeError as error:
            self._tell_failure(number, str(error))
        except BaseException as error:
            self._up.close(f"generation failed: {error}")
            raise

    def _generate(self, number: int, slot: _Slot, frame: Frame) -> Tensor:
        from collapipe_flwr.models.generating import Prompt  # only where texts are generated

        def emit(tokens: Tensor) -> bool:
            self._tell(number, {TOKENS: tokens}, {})
            return not slot.stopped.is_set()

        def ask(ids: Tensor, rows: Tensor | None) -> Tensor:
            moved = {} if rows is None else {ROWS: rows}
            self._tell(number, {TOKENS: ids, **moved}, {ASK: 1.0})
            return slot.inbox.get(self._settings.deadline_s).tensors[HIDDEN]

        prompt = Prompt(
            hidden_BTD=frame.tensors[HIDDEN],
            attention_mask=frame.tensors.get(ATTENTION_MASK),
            input_ids=frame.tensors.get(INPUT_IDS),
            settings_json=frame.text,
        )
        with torch.no_grad():
            tokens: Tensor = self._part.generate(prompt, emit, ask)
        return tokens

    def _tell(
        self, number: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]
    ) -> None:
        frame = Frame(
            kind=FrameKind.TOKENS,
            micro_batch=number,
            tensors={name: tensor.detach().clone() for name, tensor in tensors.items()},
            scalars=scalars,
        )
        self._up.send(frame, deadline_s=self._settings.deadline_s)

    def _tell_failure(self, number: int, sentence: str) -> None:
        frame = Frame(kind=FrameKind.TOKENS, micro_batch=number, scalars={DONE: 1.0}, text=sentence)
        self._up.send(frame, deadline_s=self._settings.deadline_s)
