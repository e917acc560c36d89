"""Generation over a chain of stages: several independent texts at once.

    control unit   ACTIVATION: hidden states of a prompt, or of a requested token              ->
    device         the same, through its blocks; a cache per text for decoder-only models      ->
    edge           generates; TOKENS: new ones, or those whose hidden states it needs          <-

With beams a step has several rows; ROWS are the rows of the last step that they continue.

A SERVE frame switches a chain to this mode until END and gives the number of texts generated at
once, its slots. Frames of different texts interleave, so while one text waits for a token the
devices compute for others. ``micro_batch`` is the number of a text: the first ones are
0 .. slots - 1, and when text n has ended, n + slots takes its slot. So no number occurs twice in a
chain, and late frames of a text that has ended are recognized and dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from collapipe_flwr.core.errors import CollaPipeError, LinkError, LinkTimeout, ProtocolError
from collapipe_flwr.pipeline.compute import bring, bring_home, find_place
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.link import HIDDEN, Frame, FrameKind, Link, Mailbox

TOKENS, INPUT_IDS, ATTENTION_MASK, ROWS = "/tokens", "input_ids", "attention_mask", "/rows"
PAST, PROMPT, ASK, DONE, SLOTS = "past", "prompt", "ask", "done", "slots"
LATE = "late"  # with DONE: the text failed by a timeout
MOST_SLOTS = 64
_STOPPED = "the text was stopped before its end"


def take_frame(link: Link, pause_s: float) -> Frame:
    """Take the next frame of a chain that generates.

    Raises LinkTimeout when the chain is not used for ``pause_s``, ProtocolError for a frame that
    lacks its tensor.
    """
    try:
        frame = link.receive(deadline_s=pause_s)
    except LinkTimeout as error:
        raise LinkTimeout(
            f"no text was asked for within {pause_s:g} s, the longest pause of a chain that "
            "generates: it was given up"
        ) from error
    needed = {FrameKind.ACTIVATION: HIDDEN, FrameKind.TOKENS: TOKENS}.get(frame.kind)
    if needed is not None and needed not in frame.tensors:
        raise ProtocolError(f"{link.peer} sent {frame.kind.name} without a tensor {needed!r}")
    return frame


def relay_generation(part: Any, up: Link, down: Link, settings: StageConfig) -> None:
    """Run a device until END: hidden states through its blocks, and tokens upstream."""
    part.train(False)
    caches: dict[int, Any] = {}
    pump = threading.Thread(target=_pump, args=(down, up, settings, caches), daemon=True)
    pump.start()
    while (frame := take_frame(up, settings.pause_s)).kind is not FrameKind.END:
        passed: Frame | None = frame
        if frame.kind is FrameKind.ACTIVATION:
            passed = _pass_through(part, caches, frame)
        elif frame.kind is not FrameKind.STOP:
            raise ProtocolError(f"{up.peer} sent {frame.kind.name} while generating")
        if passed is not None:
            down.send(passed, deadline_s=settings.deadline_s)
    down.send(frame, deadline_s=settings.deadline_s)
    pump.join(settings.deadline_s)


def _pass_through(part: Any, caches: dict[int, Any], frame: Frame) -> Frame | None:
    """Return the frame for the next stage; None if its text has ended."""
    came, text = bring(frame.tensors, find_place(part)), frame.micro_batch
    hidden = came[HIDDEN]
    with torch.no_grad():
        if PAST not in frame.scalars:
            context = {name: t for name, t in came.items() if name != HIDDEN}
            output = part(hidden, context)
        else:
            if PROMPT in frame.scalars:
                caches[text] = part.new_cache()
            cache = caches.get(text)
            if cache is None:
                return None
            if ROWS in frame.tensors:
                cache.reorder_cache(came[ROWS])
            output = part.advance(hidden, cache)
    return replace(frame, tensors={**frame.tensors, **bring_home({HIDDEN: output})})


def _pump(down: Link, up: Link, settings: StageConfig, caches: dict[int, Any]) -> None:
    """Forward every frame from the edge upstream, and a link error."""
    try:
        while True:
            frame = take_frame(down, settings.pause_s)
            if DONE in frame.scalars:
                caches.pop(frame.micro_batch, None)
            up.send(frame, deadline_s=settings.deadline_s)
            if frame.kind is FrameKind.END:
                return
    except LinkError as error:
        up.close(str(error))


@dataclass(slots=True)
class _ServedText:
    number: int
    answers: Mailbox[Frame]
    stopped: threading.Event = field(default_factory=threading.Event)  # by the client
    over: bool = False  # its last frame is on its way

    def stop(self) -> None:
        """End the text when it next sends tokens."""
        self.stopped.set()
        self.answers.fail(LinkError(_STOPPED))


class GeneratingEdge:
    """The last stage while it generates: a thread per text, ``slots`` of them at most."""

    def __init__(self, part: Any, up: Link, settings: StageConfig, order: Frame) -> None:
        slots = order.scalars.get(SLOTS, 0.0)
        if slots not in range(1, MOST_SLOTS + 1):
            raise ProtocolError(f"a chain generates 1 .. {MOST_SLOTS} texts at once, not {slots:g}")
        self._part = part
        self._up = up
        self._settings = settings
        self._most = int(slots)
        self._texts: dict[int, _ServedText] = {}  # the last one of each slot

    def serve(self) -> None:
        self._part.train(False)
        pause_s = self._settings.pause_s
        with ThreadPoolExecutor(self._most, thread_name_prefix="generate") as pool:
            try:
                while (frame := take_frame(self._up, pause_s)).kind is not FrameKind.END:
                    self._accept(frame, pool)
            finally:
                for text in self._texts.values():
                    text.stop()
        self._up.send(frame, deadline_s=self._settings.deadline_s)

    def _accept(self, frame: Frame, pool: ThreadPoolExecutor) -> None:
        number, peer = frame.micro_batch, self._up.peer
        text = self._texts.get(number % self._most)
        if frame.kind not in (FrameKind.ACTIVATION, FrameKind.STOP):
            raise ProtocolError(f"{peer} sent {frame.kind.name} to the edge while it generates")
        if frame.kind is FrameKind.ACTIVATION and PROMPT in frame.scalars:
            self._begin(frame, text, pool)
        elif text is None or number > text.number:
            raise ProtocolError(
                f"{peer} sent {frame.kind.name} for text {number}, which has not begun"
            )
        elif number < text.number or text.over or text.stopped.is_set():
            return  # it was on its way when the text ended
        elif frame.kind is FrameKind.STOP:
            text.stop()
        else:
            try:
                text.answers.put(frame, 0.0)
            except LinkTimeout as error:
                raise ProtocolError(
                    f"{peer} answered more of text {number} than was asked"
                ) from error

    def _begin(self, frame: Frame, before: _ServedText | None, pool: ThreadPoolExecutor) -> None:
        number, peer = frame.micro_batch, self._up.peer
        if number < 0:
            raise ProtocolError(f"{peer} began text {number}: the first one is 0")
        if before is not None and not (before.over and number > before.number):
            ended = "" if before.over else ", which has not ended"
            raise ProtocolError(
                f"{peer} began text {number} in the place of text {before.number}{ended}"
            )
        text = _ServedText(number, Mailbox(1, peer=peer))  # a text asks for one answer at a time
        self._texts[number % self._most] = text
        pool.submit(self._run, text, frame)

    def _run(self, text: _ServedText, prompt: Frame) -> None:
        """Generate one text; its last frame carries its error, and the others go on."""
        try:
            last = self._make_last_frame(text, prompt)
            text.over = True  # before the frame leaves, for the next text may follow at once
            self._up.send(last, deadline_s=self._settings.deadline_s)
        except BaseException as error:
            self._up.close(f"generation failed: {error}")
            raise

    def _make_last_frame(self, text: _ServedText, prompt: Frame) -> Frame:
        try:
            tokens = self._generate(text, prompt)
            if text.stopped.is_set():
                raise LinkError(_STOPPED)
        except CollaPipeError as error:
            late = {LATE: 1.0} if isinstance(error, LinkError) else {}
            tokens = torch.zeros(0, dtype=torch.long)
            return replace(
                _make_tokens_frame(text, {TOKENS: tokens}, {DONE: 1.0, **late}), text=str(error)
            )
        return _make_tokens_frame(text, {TOKENS: tokens}, {DONE: 1.0})

    def _generate(self, text: _ServedText, frame: Frame) -> Tensor:
        from collapipe_flwr.models.generation import Prompt  # only where texts are generated

        deadline_s, place = self._settings.deadline_s, find_place(self._part)

        def emit(tokens: Tensor) -> bool:
            self._up.send(_make_tokens_frame(text, {TOKENS: tokens}, {}), deadline_s=deadline_s)
            return not text.stopped.is_set()

        def ask(ids: Tensor, rows: Tensor | None) -> Tensor:
            moved = {} if rows is None else {ROWS: rows}
            asked = _make_tokens_frame(text, {TOKENS: ids, **moved}, {ASK: 1.0})
            self._up.send(asked, deadline_s=deadline_s)
            try:
                return bring(text.answers.get(deadline_s).tensors, place)[HIDDEN]
            except LinkTimeout as error:
                raise LinkTimeout(
                    f"the text was given up: its next token took more than {deadline_s:g} s, on a "
                    "device that is too slow or because nobody read the tokens before it"
                ) from error

        came = bring(frame.tensors, place)
        prompt = Prompt(
            hidden_BTD=came[HIDDEN],
            attention_mask=came.get(ATTENTION_MASK),
            input_ids=came.get(INPUT_IDS),
            settings_json=frame.text,
        )
        with torch.no_grad():
            tokens: Tensor = self._part.generate(prompt, emit, ask)
        return tokens


def _make_tokens_frame(
    text: _ServedText, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]
) -> Frame:
    return Frame(
        kind=FrameKind.TOKENS,
        micro_batch=text.number,
        tensors={name: tensor.detach().clone() for name, tensor in bring_home(tensors).items()},
        scalars=scalars,
    )
