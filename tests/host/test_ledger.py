"""Laws of what a host reserves: all or nothing, before it is there, and given back at the end."""

from __future__ import annotations

import time

import pytest
import torch

from collapipe_flwr.core.errors import LinkError
from collapipe_flwr.generation.backends import STATELESS
from collapipe_flwr.host import session as sessions
from collapipe_flwr.host.ledger import Account, Ledger, NoRoom
from collapipe_flwr.host.service import HostService
from collapipe_flwr.host.servicer import Call, Servicer
from collapipe_flwr.host.stores import TensorStore
from collapipe_flwr.pipeline import benchmark
from collapipe_flwr.pipeline.benchmark import BenchmarkAnswer, BenchmarkRequest
from collapipe_flwr.pipeline.optimizer import OptimizerConfig
from collapipe_flwr.pipeline.state import PartState, compute_digests
from collapipe_flwr.transport import methods
from collapipe_flwr.transport.methods import decode_message, encode_message
from tests.accelerators import accelerator  # noqa: F401
from tests.host.chain_to_edge import build_head, request, service, session_key
from tests.host.test_sessions import Authorizer, in_thread
from tests.pipeline.chains import Head

ADAMW = OptimizerConfig(name="adamw")
HEAD = Head().state_dict()
WEIGHTS = sum(t.nbytes for t in HEAD.values())
STEPS = 4 * len(HEAD)  # AdamW counts them for each parameter
STATE = 4 * WEIGHTS + STEPS  # weights, gradients, and two moments


def opened(ledger: Ledger, *ids: str, **options: object) -> HostService:
    host = service(ledger=ledger)
    for session_id in ids:
        host.open(request(session_id, optimizer=ADAMW, **options))
    return host


def test_a_reservation_is_made_as_a_whole_or_not_at_all() -> None:
    ledger = Ledger(10)
    one, other = Account(ledger), Account(ledger)
    one.reserve({"a": 4, "b": 2})
    with pytest.raises(NoRoom, match="no room"):
        other.reserve({"a": 3, "b": 2})
    assert ledger.held_bytes == 6
    one.reserve({"a": 1, "c": 5})  # as much as before
    assert (ledger.held_bytes, one.find_size("a"), one.find_size("b"), one.find_size("c")) == (
        8,
        1,
        2,
        5,
    )
    one.close()
    assert (ledger.held_bytes, ledger.peak_bytes) == (0, 8)
    with pytest.raises(NoRoom, match="was closed"):
        one.reserve({"a": 1})


def test_accounts_of_one_owner_share_what_it_may_hold() -> None:
    ledger = Ledger(100)
    first, second = (Account(ledger, "guest", 10) for _ in range(2))
    first.reserve({"a": 8})
    with pytest.raises(NoRoom):
        second.reserve({"a": 3})
    Account(ledger, "server", 100).reserve({"a": 92})
    with pytest.raises(NoRoom):
        second.reserve({"a": 1})


def test_a_session_reserves_its_state_and_gives_it_back() -> None:
    ledger = Ledger()
    host = opened(ledger, "a", "b")
    host.push_weights(session_key("a"), HEAD)
    assert ledger.held_bytes == ledger.peak_bytes == STATE
    host.push_weights(session_key("b"), HEAD)
    host.close(session_key("a"))
    assert ledger.held_bytes == STATE
    host.close(session_key("b"))
    assert ledger.held_bytes == 0


@pytest.mark.parametrize("most_bytes", [WEIGHTS - 1, 2 * WEIGHTS - 1, STATE - 1])
def test_a_push_without_room_changes_nothing(most_bytes: int) -> None:
    ledger = Ledger(most_bytes)
    host = opened(ledger, "a")
    with pytest.raises(NoRoom, match="--memory-mb"):
        host.push_weights(session_key("a"), HEAD)
    assert ledger.held_bytes == 0
    with pytest.raises(LinkError, match="push them first"):
        host.copy_weights(session_key("a"))


def test_pushes_side_by_side_share_the_room() -> None:
    """What has been announced counts, though it is not there yet."""
    host = opened(Ledger(STATE), "a", "b")
    gate = Authorizer()

    def receive(reserve):
        reserve(WEIGHTS)
        gate.wait()
        return HEAD

    with in_thread(lambda: host.receive_weights(session_key("a"), receive)) as done:
        assert gate.entered.wait(60)
        with pytest.raises(NoRoom):
            host.push_weights(session_key("b"), HEAD)
        gate.opened.set()
    assert done == [None]
    with pytest.raises(NoRoom):
        host.push_weights(session_key("b"), HEAD)
    host.close(session_key("a"))
    host.push_weights(session_key("b"), HEAD)


def test_what_arrives_for_a_session_that_was_closed_is_not_taken() -> None:
    ledger = Ledger()
    host = opened(ledger, "a")

    def receive(reserve):
        reserve(WEIGHTS)
        host.close(session_key("a"))
        reserve(WEIGHTS)
        return HEAD

    with pytest.raises(NoRoom, match="was closed"):
        host.receive_weights(session_key("a"), receive)
    assert ledger.held_bytes == 0


def _device(ledger: Ledger) -> HostService:
    """With a closed session's weights and slots in its store."""
    host = HostService(build_head, store=TensorStore(ledger), ledger=ledger)
    host.open(request("old", optimizer=ADAMW, keep_optimizer=True))
    slots = {key: (torch.ones(()), p, p) for key, p in HEAD.items()}
    host.push_weights(session_key("old"), PartState(weights=HEAD, optimizer=slots).copy().flatten())
    host.close(session_key("old"))
    assert ledger.held_bytes == host.count_spare_bytes() == 3 * WEIGHTS + STEPS
    return host


def test_what_the_next_session_asks_for_is_handed_over_and_the_rest_forgotten() -> None:
    ledger = Ledger()
    host = _device(ledger)
    host.open(request("new", optimizer=ADAMW))
    digests = compute_digests({"out.weight": HEAD["out.weight"], "out.bias": torch.ones(5)})
    assert host.find_missing(session_key("new"), digests) == ("out.bias",)
    assert ledger.held_bytes == HEAD["out.weight"].nbytes
    assert host.find_missing(session_key("new"), digests) == ("out.bias",)  # twice is fine
    host.push_weights(session_key("new"), {"out.bias": torch.ones(5)})
    assert ledger.held_bytes == STATE
    assert torch.equal(host.copy_weights(session_key("new"))["out.weight"], HEAD["out.weight"])


def test_slots_of_equal_content_stay_apart() -> None:
    """The step counts of all parameters are equal, and each is counted up by itself."""
    host = _device(Ledger())
    host.open(request("new", optimizer=ADAMW))
    slots = {key: (torch.ones(()), p, p) for key, p in HEAD.items()}
    state = PartState(weights=HEAD, optimizer=slots).flatten()
    assert host.find_missing(session_key("new"), compute_digests(state)) == ()
    host.push_weights(session_key("new"), {})
    with host.read(session_key("new"), with_optimizer=True) as tensors:
        assert len({t.data_ptr() for t in tensors.values()}) == len(state)
    found = host.copy_weights(session_key("new"), with_optimizer=True)
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_a_part_is_pushed_into_a_host_that_is_as_large_as_its_state() -> None:
    """Also where a last round's part lies there, and where slots come with the weights."""
    ledger = Ledger(STATE)
    host = _device(ledger)
    host.open(request("new", optimizer=ADAMW))
    slots = {key: (torch.ones(()), p, p) for key, p in HEAD.items()}
    state = dict(PartState(weights=HEAD, optimizer=slots).copy().flatten())
    state["out.weight"] += 1
    wanted = host.find_missing(session_key("new"), compute_digests(state))
    assert wanted == ("out.weight",)
    host.push_weights(session_key("new"), {key: state[key] for key in wanted})
    assert ledger.held_bytes == ledger.peak_bytes == STATE


def test_a_step_that_does_not_end_keeps_its_room_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "BUSY_S", 0.05)
    ledger, gate = Ledger(), Authorizer()
    host = opened(ledger, "a")
    host.push_weights(session_key("a"), HEAD)

    def read() -> None:
        with host.read(session_key("a")):
            gate.wait()

    with in_thread(read):
        assert gate.entered.wait(60)
        with pytest.raises(LinkError, match="what uses it has not ended"):
            host.close(session_key("a"))
        with pytest.raises(LinkError, match="no session a"):
            host.copy_weights(session_key("a"))
        assert ledger.held_bytes == STATE
        gate.opened.set()
    assert (ledger.held_bytes, host.measure_load().sessions) == (0, 0)


def test_the_next_segment_waits_for_the_room_of_one_whose_pass_has_not_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a replay: the control unit does not wait for the end of a long pass."""
    gate, closed = Authorizer(), session_key("a")
    host = opened(Ledger(int(1.5 * STATE)), "a", blocks=(0, 1))
    host.push_weights(closed, HEAD)

    def read() -> None:
        with host.read(closed):
            gate.wait()

    def replay() -> None:
        host.open(request("b", optimizer=ADAMW, blocks=(0, 2)))
        host.push_weights(session_key("b"), HEAD)

    with in_thread(read):
        assert gate.entered.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "BUSY_S", 0.05)
            with pytest.raises(LinkError, match="what uses it has not ended"):
                host.close(closed)
        with in_thread(replay) as replayed:
            time.sleep(0.2)
            early = list(replayed)
            gate.opened.set()
    assert (early, replayed) == ([], [None])
    assert host.copy_weights(session_key("b"))


class FakeContext:
    """Of a call that nobody cuts off."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def abort(self, _: object, details: str) -> None:
        raise AssertionError(details)


@pytest.mark.parametrize(
    ("most_bytes", "expected"), [(10**6, 1000 + 3 * WEIGHTS + STEPS), (STATE, STATE)]
)
def test_a_benchmark_tells_what_the_next_plan_may_have(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, expected: int
) -> None:
    """What is free, with what is kept of the last round, within what the host may hold."""
    free = BenchmarkAnswer(flop=1.0, seconds=1.0, memory_bytes=1000)
    monkeypatch.setattr("collapipe_flwr.host.servicer.run_benchmark", lambda *_: free)
    servicer = Servicer(_device(Ledger(most_bytes)))
    asked = encode_message(BenchmarkRequest())
    (answer,) = servicer.answer(methods.BENCHMARK, asked, FakeContext(), None)
    assert decode_message(benchmark.BenchmarkAnswer, answer).memory_bytes == expected
    servicer.close()


def test_what_torch_keeps_of_an_accelerator_is_free_for_the_next_plan(
    accelerator: torch.device,  # noqa: F811
) -> None:
    """After a benchmark and a session. Torch keeps what tensors took for tensors to come."""
    large = torch.nn.Linear(1000, 1000)
    servicer = Servicer(HostService(lambda *_: large, compute=accelerator))

    def free() -> int:
        asked = encode_message(BenchmarkRequest(seconds=0.01))
        (answer,) = servicer.answer(methods.BENCHMARK, asked, FakeContext(), None)
        return decode_message(benchmark.BenchmarkAnswer, answer).memory_bytes

    free()  # a real one loads its libraries
    torch.get_device_module(accelerator.type).empty_cache()
    expected = pytest.approx(free(), abs=large.weight.nbytes // 4)
    assert free() == expected
    service, key = servicer.service, session_key("a")
    service.open(request("a", optimizer=ADAMW))
    service.push_weights(key, large.state_dict())
    named = {methods.SESSION_KEY: key.session_id, methods.TOKEN_KEY: key.token}
    large = torch.nn.Linear(1, 1)
    servicer.close_session(b"", Call(FakeContext(), None, named))
    assert free() == expected
    servicer.close()


def test_a_part_that_only_generates_reserves_no_optimiser() -> None:
    """Twice its weights: they are copied as they come."""
    ledger = Ledger()
    host = opened(ledger)
    host.open(request("a", optimizer=STATELESS))
    host.push_weights(session_key("a"), HEAD)
    assert ledger.held_bytes == ledger.peak_bytes == 2 * WEIGHTS
