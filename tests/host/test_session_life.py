"""Any order of calls, streams and failures: a host does what a simple model says.

Streams are real ones, with a control unit at their other end, and stop where the machine wants:
between claim and begin, between steps, and in the middle of one, while calls come in. All waits are
for events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from collapipe_flwr.core.errors import CollaPipeError, LinkError
from collapipe_flwr.host.ledger import Ledger
from collapipe_flwr.host.service import HostService
from collapipe_flwr.host.session import SessionStream
from collapipe_flwr.host.stores import TensorStore
from collapipe_flwr.pipeline.config import SessionKey, SessionRequest
from collapipe_flwr.pipeline.link import Frame, MemoryLink, make_memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.pipeline.state import compute_digests
from tests.closeness import assert_same
from tests.host.chain_to_edge import request, session_key
from tests.pipeline.chains import Embedding, Head, make_batch, make_parts, settings
from tests.thorough import examples

ADAMW = OptimizerConfig(name="adamw", learning_rate=0.05)
IDS, VERSIONS = ("a", "b", "c"), st.integers(0, 1)
MOST_SESSIONS, FORGET_AFTER_S, WAIT_S = 2, 100.0, 60.0
State = Mapping[str, Tensor]


class GatedHead(Head):
    """Waits within its forward pass while `gate` is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def forward(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return super().forward(hidden_BTD, context)


def build(_: SessionRequest, weights: State) -> GatedHead:
    head = GatedHead()
    head.load_weights(weights)
    return head


@cache
def weights_of(version: int) -> State:
    torch.manual_seed(version)
    return Head().state_dict()


@cache
def embedding() -> Embedding:
    part = make_parts((1,))[0]
    assert isinstance(part, Embedding)
    return part


def first_stage(link: MemoryLink) -> FirstStage:
    """The embedding does not train, so that only the head has a past."""
    optimizer = Optimizer(ADAMW, [])
    return FirstStage(embedding(), optimizer, settings("control unit"), downstream=link)


@cache
def state_after(version: int, steps: int) -> State:
    """Weights and slots of an undisturbed head."""
    if not steps:
        return weights_of(version)
    host = HostService(build)
    host.open(request(optimizer=ADAMW))
    host.push_weights(session_key(), weights_of(version))
    stream = Driver(host, "c1", host.claim(session_key()))
    stream.begin()
    for step in range(steps):
        stream.step(step)
    stream.finish()
    return host.copy_weights(session_key(), with_optimizer=True)


class NoticedLink:
    """Says when a stage waits at it, and when its end is closed."""

    def __init__(self, link: MemoryLink) -> None:
        self.waits, self.broken = threading.Event(), threading.Event()
        self._link = link

    def receive(self, *, deadline_s: float) -> Frame:
        self.waits.set()
        return self._link.receive(deadline_s=deadline_s)

    def close(self, error: str = "") -> None:
        self._link.close(error)
        self.broken.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class Driver:
    """The control unit at the other end of one claimed stream."""

    def __init__(self, host: HostService, session_id: str, stream: SessionStream) -> None:
        self.part = host.find(session_key(session_id)).part
        self.stream = stream
        self._host = host
        self.link, theirs = make_memory_pair("control unit", "edge")
        self._theirs = NoticedLink(theirs)
        self.waits = self._theirs.waits
        self.errors: list[CollaPipeError] = []
        self.broken = self._theirs.broken
        self._serving = threading.Thread(target=self._serve)
        self._stepping: threading.Thread | None = None
        self._first = first_stage(self.link)

    def _serve(self) -> None:
        try:
            self._host.serve(self.stream, self._theirs)
        except CollaPipeError as error:
            self.errors.append(error)

    def begin(self) -> None:
        self._serving.start()

    def step(self, index: int) -> None:
        self._first.train_step(make_batch((2,), seed=index))

    def begin_step(self, index: int) -> None:
        """A step that stops in the head."""
        assert isinstance(self.part, GatedHead)
        self.part.entered.clear()
        self.part.gate.clear()
        self._stepping = threading.Thread(target=self._try_step, args=(index,))
        self._stepping.start()
        assert self.part.entered.wait(WAIT_S)

    def _try_step(self, index: int) -> None:
        try:
            self.step(index)
        except CollaPipeError as error:
            self.errors.append(error)

    def finish_step(self) -> None:
        assert isinstance(self.part, GatedHead) and self._stepping is not None
        self.part.gate.set()
        self._stepping.join(WAIT_S)
        assert not self._stepping.is_alive()

    def finish(self) -> None:
        self._first.finish()
        self.over()

    def over(self) -> None:
        self._serving.join(WAIT_S)
        assert not self._serving.is_alive()


@dataclass
class Model:
    """What one session should be."""

    used_s: float
    version: int | None = None  # of the weights that were pushed
    steps: int = 0
    driver: Driver | None = None
    phase: str = "empty"  # or rest, claimed, running, stepping

    @property
    def at_rest(self) -> bool:
        return self.phase in ("empty", "rest")

    def filled(self, version: int) -> None:
        self.version, self.steps, self.phase = version, 0, "rest"

    def begins(self) -> None:
        assert self.driver is not None
        self.driver.begin()
        assert self.driver.waits.wait(WAIT_S)
        self.phase = "running"

    def steps_on(self, *, stops: bool) -> None:
        """One step, or the beginning of one."""
        assert self.driver is not None
        if stops:
            self.driver.begin_step(self.steps)
            self.phase = "stepping"
        else:
            self.driver.step(self.steps)
            self.steps += 1

    def stops(self) -> None:
        self.driver, self.phase = None, "rest"


def some(*phases: str) -> Callable[[Host], bool]:
    """Whether a session is in one of these phases."""
    return lambda machine: bool(machine.keys_in(*phases))


class Host(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.models: dict[str, Model] = {}
        self.late: list[Driver] = []  # claimed, and broken off before they began
        self.ledger = Ledger()
        self.host = HostService(
            build,
            most_sessions=MOST_SESSIONS,
            forget_after_s=FORGET_AFTER_S,
            clock=lambda: self.now_s,
            store=TensorStore(self.ledger),
            ledger=self.ledger,
        )

    def teardown(self) -> None:
        while self.late:
            self._begin_late()
        for model in self.models.values():
            self._kill(model)

    def _kill(self, model: Model) -> None:
        if model.driver is not None and model.phase != "claimed":
            model.driver.link.close("killed")
            if model.phase == "stepping":
                model.driver.finish_step()
            model.driver.over()

    def keys_in(self, *phases: str) -> list[str]:
        return sorted(k for k, m in self.models.items() if not phases or m.phase in phases)

    def _pick(self, data: st.DataObject, *phases: str) -> tuple[str, Model]:
        """A session that is asked for now."""
        key = data.draw(st.sampled_from(self.keys_in(*phases)))
        self.models[key].used_s = self.now_s
        return key, self.models[key]

    def _refused(self, call: Callable[[], object], said: str) -> None:
        with pytest.raises(LinkError, match=said):
            call()

    # -- calls ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.models) < MOST_SESSIONS)
    @rule(data=st.data(), version=st.sampled_from((0, 1, None)))
    def open(self, data: st.DataObject, version: int | None) -> None:
        key = data.draw(st.sampled_from([k for k in IDS if k not in self.models]))
        self.host.open(request(key, optimizer=ADAMW))
        self.models[key] = model = Model(self.now_s)
        if version is not None:
            self.host.push_weights(session_key(key), weights_of(version))
            model.filled(version)

    @precondition(lambda self: len(self.models) == MOST_SESSIONS)
    @rule(seconds=st.sampled_from((10.0, 150.0)))
    def open_one_more(self, seconds: float) -> None:
        self.now_s += seconds
        key = next(k for k in IDS if k not in self.models)
        oldest_s = self.now_s - FORGET_AFTER_S
        for left in self.keys_in("empty", "rest"):
            if self.models[left].used_s < oldest_s:
                del self.models[left]
        if len(self.models) >= MOST_SESSIONS:
            self._refused(lambda: self.host.open(request(key)), "its limit")
        else:
            self.host.open(request(key, optimizer=ADAMW))
            self.models[key] = Model(self.now_s)

    @precondition(some("empty", "rest"))
    @rule(data=st.data(), version=VERSIONS, bad=st.sampled_from((False, False, True)))
    def push(self, data: st.DataObject, version: int, bad: bool) -> None:
        key, model = self._pick(data, "empty", "rest")
        tensors = dict(weights_of(version))
        if bad:
            tensors["optimizer/0/out.weight"] = torch.ones(3)
            with pytest.raises(CollaPipeError):
                self.host.push_weights(session_key(key), tensors)
        else:
            self.host.push_weights(session_key(key), tensors)
            model.filled(version)

    @precondition(some("empty", "rest"))
    @rule(data=st.data(), version=VERSIONS, steps=st.integers(0, 2), pushes=st.booleans())
    def push_what_is_missing(
        self, data: st.DataObject, version: int, steps: int, pushes: bool
    ) -> None:
        """Weights and slots of some step, of which the host may have kept some."""
        key, model = self._pick(data, "empty", "rest")
        state = state_after(version, steps)
        wanted = self.host.find_missing(session_key(key), compute_digests(state))
        if pushes:
            self.host.push_weights(session_key(key), {name: state[name].clone() for name in wanted})
            assert_same(self.host.copy_weights(session_key(key), with_optimizer=True), state)
            self.host.push_weights(session_key(key), weights_of(version))
            model.filled(version)

    @precondition(some("empty", "rest"))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self._close(self._pick(data, "empty", "rest")[0])

    def _close(self, key: str) -> None:
        assert self._ended(key, lambda: self.host.close(session_key(key))) is None
        self.models.pop(key, None)

    def _ended(self, key: str, call: Callable[[], None]) -> CollaPipeError | None:
        """Make a call that returns only when no stream uses the part any more."""
        model, errors = self.models[key], list[CollaPipeError]()

        def run() -> None:
            try:
                call()
            except CollaPipeError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        if model.phase == "stepping":
            assert model.driver is not None
            assert model.driver.broken.wait(WAIT_S)  # the stream is broken off ...
            assert thread.is_alive()  # ... and the part still computes
            model.driver.finish_step()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        if model.phase == "claimed":
            assert model.driver is not None
            self.late.append(model.driver)
            model.stops()
        elif model.driver is not None:
            self._stream_failed(key, model)
        return errors[0] if errors else None

    def _stream_failed(self, key: str, model: Model) -> None:
        assert model.driver is not None
        model.driver.over()
        model.phase = "gone"
        del self.models[key]

    @precondition(some("empty", "claimed", "running", "stepping"))
    @rule(data=st.data())
    def call_in_vain(self, data: st.DataObject) -> None:
        key, model = self._pick(data, "empty", "claimed", "running", "stepping")
        said = "push them first" if model.phase == "empty" else "in the middle of a stream"
        for call in (
            lambda: self.host.claim(session_key(key)),
            lambda: self.host.copy_weights(session_key(key)),
        ):
            self._refused(call, said)
        if model.phase != "empty":
            self._refused(lambda: self.host.push_weights(session_key(key), weights_of(0)), said)
            self._refused(lambda: self.host.find_missing(session_key(key), {}), said)
        self._refused(lambda: self.host.open(request(key)), "open already")
        wrong = SessionKey(session_id=key, token="another token of length")
        self._refused(lambda: self.host.close(wrong), "no session")

    # -- streams --------------------------------------------------------------------------------

    @precondition(some("rest"))
    @rule(data=st.data(), to=st.sampled_from(("claimed", "running", "stepping", "stepping")))
    def claim(self, data: st.DataObject, to: str) -> None:
        key, model = self._pick(data, "rest")
        model.driver, model.phase = (
            Driver(self.host, key, self.host.claim(session_key(key))),
            "claimed",
        )
        if to != "claimed":
            model.begins()
            model.steps_on(stops=False)
        if to == "stepping":
            model.steps_on(stops=True)

    @precondition(some("claimed"))
    @rule(data=st.data(), given_up=st.sampled_from((False, False, True)))
    def begin(self, data: st.DataObject, given_up: bool) -> None:
        key, model = self._pick(data, "claimed")
        self.host.find(session_key(key))  # as `_pick` says
        if given_up:
            assert model.driver is not None
            self.host.release(model.driver.stream)
            model.stops()
        else:
            model.begins()

    @precondition(lambda self: self.late)
    @rule()
    def begin_late(self) -> None:
        self._begin_late()

    def _begin_late(self) -> None:
        """A stream that was broken off before it began does not run."""
        driver = self.late.pop()
        driver.begin()
        driver.over()
        assert "was closed" in str(driver.errors[0])
        assert not driver.waits.is_set()

    @precondition(some("running"))
    @rule(data=st.data(), stops=st.booleans())
    def step(self, data: st.DataObject, stops: bool) -> None:
        key, model = self._pick(data, "running")
        self.host.find(session_key(key))
        model.steps_on(stops=stops)

    @precondition(some("stepping"))
    @rule(data=st.data())
    def finish_step(self, data: st.DataObject) -> None:
        key, model = self._pick(data, "stepping")
        self.host.find(session_key(key))
        assert model.driver is not None
        model.driver.finish_step()
        model.steps, model.phase = model.steps + 1, "running"

    @precondition(some("running"))
    @rule(data=st.data(), in_order=st.booleans())
    def finish(self, data: st.DataObject, in_order: bool) -> None:
        key, model = self._pick(data, "running")
        self.host.find(session_key(key))
        assert model.driver is not None
        if in_order:
            model.driver.finish()
            model.stops()
        else:
            model.driver.link.close("lost power")
            self._stream_failed(key, model)

    @precondition(some("claimed", "running", "stepping"))
    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        self._close(self._pick(data, "claimed", "running", "stepping")[0])

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def as_the_model_says(self) -> None:
        health = self.host.measure_load()
        assert health.sessions == len(self.models)
        assert health.running == sum(not model.at_rest for model in self.models.values())
        for key, model in self.models.items():
            if model.phase == "rest":
                assert model.version is not None
                found = self.host.copy_weights(session_key(key), with_optimizer=True)
                assert_same(found, state_after(model.version, model.steps))
        self._all_is_reserved()

    def _all_is_reserved(self) -> None:
        held = 0
        for key, model in self.models.items():
            session = self.host.find(session_key(key))
            session.used_s = model.used_s
            names = {"part"} if model.version is not None else set()
            assert session.account.entries.keys() - {"found"} == names
            held += sum(session.account.entries.values())
        assert self.ledger.held_bytes == held + self.host.count_spare_bytes()


TestHost = Host.TestCase
TestHost.settings = examples(10, 40, stateful_step_count=25, derandomize=True, database=None)
