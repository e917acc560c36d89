"""Texts generated over a cluster are those of the unsplit model, several at once, greedily."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.order import PATIENCE_PER_STAGE
from collapipe_flwr.config.cluster_file import MemberConfig
from collapipe_flwr.config.privacy import PrivacyConfig
from collapipe_flwr.core.errors import ConfigError, LinkError, LinkTimeout, ModelError
from collapipe_flwr.generation.backends import (
    IDLE_S,
    ServedModel,
    make_thread_backend,
    open_daemon_backend,
    plan_evenly,
)
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.parts import SegmentPart
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline import generation, generation_driver
from collapipe_flwr.pipeline.generation_driver import GenerationDriver
from collapipe_flwr.pipeline.link import Mailbox
from collapipe_flwr.transport.client import HostClient
from tests.cluster.hosted import daemons
from tests.ports import free_port
from tests.thorough import few
from tests.threads import none_left

SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 32, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 2, "d_kv": 16}
GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64}
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
SMOLLM3 = {"use_sliding_window": True, "sliding_window": 6, "no_rope_layer_interval": 2}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "marian": ("seq2seq", SEQ2SEQ, 0),
    "bart": ("seq2seq", SEQ2SEQ, 0),
    "t5": ("seq2seq", {**T5, "d_ff": 48}, 0),
    "gpt2": ("causal-lm", GPT2, 1),
    "llama": ("causal-lm", LLAMA, 0),
    "qwen2": ("causal-lm", {**LLAMA, **SLIDING}, 2),
    "qwen3": ("causal-lm", {**LLAMA, **SLIDING, "head_dim": 16}, 1),
    "gemma3_text": ("causal-lm", {**LLAMA, **GEMMA3}, 1),
    "smollm3": ("causal-lm", {**LLAMA, **SMOLLM3}, 0),
    "phi3": ("causal-lm", {**LLAMA, "sliding_window": 6}, 1),
    "olmo2": ("causal-lm", LLAMA, 1),
}
PROMPTS = [[5, 9, 33, 21, 7], [40, 41], [13, 3, 3, 50, 51, 52, 8], [22, 58, 4]]
NEW_TOKENS = 10


def lively(tensor: Tensor) -> Tensor:
    """Matrices of a size at which every input changes the output."""
    if tensor.dim() < 2:
        return tensor
    return tensor / (tensor.std() + 1e-9) * 2.0 / tensor.shape[-1] ** 0.5


class Case:
    """A model with lively weights, and what it writes when it is not split."""

    def __init__(self, model_type: str) -> None:
        task, overrides, edge_blocks = MODELS[model_type]
        spec = make_spec(
            task,
            model_type=model_type,
            overrides=overrides,
            vocab_size=60,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            decoder_start_token_id=0 if task == "seq2seq" else None,
            edge_blocks=edge_blocks,
        )
        self.splitter = Splitter(spec)
        first = self.splitter.initial_weights(3)
        self.weights = {key: lively(tensor) for key, tensor in first.items()}
        self.whole: Any = self.splitter.build_whole(self.weights)

    def settings(self, **changes: object) -> str:
        chosen = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **changes}
        return json.dumps({**self.whole.generation_config.to_dict(), **chosen})

    def unsplit(self, prompt: list[int], **changes: object) -> list[int]:
        ids = torch.tensor([prompt])
        chosen = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **changes}
        output = self.whole.generate(ids, attention_mask=torch.ones_like(ids), **chosen)
        shown = 1 if self.splitter.decodes else len(prompt)
        found: list[int] = output[0, shown:].tolist()
        return found


@pytest.fixture(scope="module", params=few(MODELS, 0, 1, 2, 3, 4, 5, 7, 9))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def served(case: Case, slots: int, deadline_s: float = 20.0) -> ServedModel:
    return ServedModel(
        splitter=case.splitter, weights=case.weights, slots=slots, deadline_s=deadline_s
    )


@contextmanager
def local(
    case: Case, slots: int = 2, devices: int = 2, deadline_s: float = 20.0
) -> Iterator[GenerationDriver]:
    site = make_thread_backend(served(case, slots, deadline_s), devices)
    with site.chain(site.device_ids) as driver:
        yield driver


def written(driver: GenerationDriver, prompt: list[int], settings: str) -> list[int]:
    return [
        t for piece in driver.generate(torch.tensor([prompt]), settings) for t in piece.tolist()
    ]


def test_the_text_is_that_of_the_unsplit_model(case: Case) -> None:
    expected = [case.unsplit(prompt) for prompt in PROMPTS]
    assert len({tuple(text) for text in expected}) >= 3  # the prompt matters
    with local(case) as driver:
        assert [written(driver, prompt, case.settings()) for prompt in PROMPTS] == expected


@pytest.mark.parametrize("model_type", ["marian", "llama"])
def test_several_texts_at_once_do_not_mix(model_type: str) -> None:
    case = Case(model_type)
    expected = [case.unsplit(prompt) for prompt in PROMPTS]
    with local(case, slots=3) as driver, ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda p: written(driver, p, case.settings()), PROMPTS))
    assert found == expected


@pytest.mark.parametrize("model_type", ["marian", "gpt2"])
def test_tokens_come_one_by_one_and_a_reader_may_leave(model_type: str) -> None:
    case = Case(model_type)
    expected = case.unsplit(PROMPTS[0])
    with local(case, slots=1) as driver:
        pieces = driver.generate(torch.tensor([PROMPTS[0]]), case.settings())
        assert [next(pieces).tolist(), next(pieces).tolist()] == [[t] for t in expected[:2]]
        pieces.close()  # type: ignore[attr-defined]
        assert written(driver, PROMPTS[1], case.settings()) == case.unsplit(PROMPTS[1])


def test_waiting_for_a_slot_ends() -> None:
    case = Case("gpt2")
    with local(case, slots=1, deadline_s=4.0) as driver:
        first = driver.generate(torch.tensor([PROMPTS[0]]), case.settings())
        next(first)
        with pytest.raises(LinkTimeout, match="all 1 slots were busy"):
            written(driver, PROMPTS[1], case.settings())
        first.close()  # type: ignore[attr-defined]
        assert written(driver, PROMPTS[1], case.settings()) == case.unsplit(PROMPTS[1])


@pytest.mark.parametrize("model_type", ["marian", "gpt2", "llama", "qwen2"])
def test_beams_are_those_of_the_unsplit_model(model_type: str) -> None:
    """With caches on the devices too: a decoder-only model keeps lower blocks there."""
    case = Case(model_type)
    beams = {"num_beams": 3, "length_penalty": 0.6}
    greedy = [case.unsplit(prompt) for prompt in PROMPTS]
    assert case.splitter.decodes or greedy != [case.unsplit(prompt, **beams) for prompt in PROMPTS]
    with local(case) as driver:
        for prompt in PROMPTS:
            found = written(driver, prompt, case.settings(**beams))
            assert found == case.unsplit(prompt, **beams)


@pytest.mark.parametrize("model_type", ["marian", "gpt2"])
def test_a_seed_samples_what_it_samples_from_the_unsplit_model(model_type: str) -> None:
    case = Case(model_type)
    chosen = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9}

    def unsplit(prompt: list[int], seed: int) -> list[int]:
        torch.manual_seed(seed)
        return case.unsplit(prompt, **chosen)

    seeds = range(4)
    expected = [unsplit(PROMPTS[0], seed) for seed in seeds]
    assert len({tuple(text) for text in expected}) > 1
    with local(case, slots=4) as driver, ThreadPoolExecutor(4) as pool:
        settings = [case.settings(**chosen, seed=seed) for seed in seeds]
        found = list(pool.map(lambda s: written(driver, PROMPTS[0], s), settings))
    assert found == expected


def test_a_refused_text_leaves_the_chain_in_order() -> None:
    case = Case("gpt2")
    with local(case, slots=1) as driver:
        with pytest.raises(ModelError, match="num_beams must be 1 where texts are sampled"):
            written(driver, PROMPTS[0], case.settings(num_beams=2, do_sample=True))
        with pytest.raises(ModelError, match="settings cannot be read"):
            written(driver, PROMPTS[0], "[")
        assert written(driver, PROMPTS[0], case.settings()) == case.unsplit(PROMPTS[0])


@pytest.mark.parametrize("model_type", ["marian", "gpt2"])
def test_daemons_write_the_same_text_and_keep_nothing(model_type: str) -> None:
    case = Case(model_type)
    with (
        daemons(2) as (cluster, edge),
        HostClient(edge) as client,
        open_daemon_backend(served(case, slots=2), cluster, edge) as site,
    ):
        with site.chain(site.device_ids) as driver:
            found = [written(driver, prompt, case.settings()) for prompt in PROMPTS]
        assert found == [case.unsplit(prompt) for prompt in PROMPTS]
        for member in cluster.devices:
            with HostClient(member.address) as device:
                assert device.ask_health().sessions == 0
        assert client.ask_health().sessions == 0


@pytest.mark.parametrize(
    ("trusted", "kept", "expected"),
    [
        ((), 0, [("a", 0, 2), ("b", 2, 4), ("c", 4, 6)]),
        (("c",), 1, [("c", 0, 2), ("a", 2, 4), ("b", 4, 6)]),
        (("c",), 5, [("c", 0, 5), ("a", 5, 6)]),
        (("b", "c"), 9, [("b", 0, 3), ("c", 3, 6)]),
    ],
)
def test_blocks_for_trusted_devices_are_on_no_other(
    trusted: tuple[str, ...], kept: int, expected: list[tuple[str, int, int]]
) -> None:
    plan = plan_evenly(6, ["a", "b", "c"], kept=kept, trusted=trusted)
    assert [(s.device_id, s.first_block, s.stop_block) for s in plan.segments] == expected


def test_without_a_trusted_device_no_text_is_written() -> None:
    with pytest.raises(ConfigError, match=r"no trusted device of shed is .*trusted-blocks is 2"):
        plan_evenly(6, ["a", "b"], "shed", kept=2, trusted=("c",))


def test_texts_end_on_the_edges_of_the_file_and_heed_its_trust() -> None:
    """The first edge is gone, the second a device, which then holds no block."""
    case = Case("gpt2")
    with daemons(3) as (cluster, edge):
        gone, here = MemberConfig(name="gone", address=f"127.0.0.1:{free_port()}"), cluster.devices
        boards = (*here[:2], replace(here[2], trusted=True))
        cluster = replace(
            cluster,
            devices=boards,
            edge=gone,
            other_edges=(boards[0],),
            privacy=PrivacyConfig(trusted_blocks=2),
        )
        with (
            open_daemon_backend(served(case, slots=2, deadline_s=2.0), cluster) as site,
            site.chain(site.device_ids) as driver,
        ):
            assert written(driver, PROMPTS[0], case.settings()) == case.unsplit(PROMPTS[0])
            sessions = []
            for member in boards:
                with HostClient(member.address) as device:
                    sessions.append(device.ask_health().sessions)
            assert sessions == [1, 1, 1]
        home = replace(cluster, privacy=PrivacyConfig(labels="home"))
        with pytest.raises(ConfigError, match=r"--edge .* keeps the head at its control unit"):
            open_daemon_backend(served(case, slots=2), home, edge).__enter__()
        with (
            open_daemon_backend(served(case, slots=2), home) as site,
            site.chain(site.device_ids) as driver,
        ):
            assert written(driver, PROMPTS[0], case.settings()) == case.unsplit(PROMPTS[0])


@contextmanager
def on_daemons(case: Case) -> Iterator[GenerationDriver]:
    with (
        daemons(2) as (cluster, edge),
        open_daemon_backend(served(case, slots=2), cluster, edge) as site,
        site.chain(site.device_ids) as driver,
    ):
        yield driver


@pytest.mark.parametrize("place", [local, on_daemons])
def test_every_stage_and_link_waits_as_long_as_the_chain_may_be_idle(
    place: Callable[[Case], AbstractContextManager[GenerationDriver]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, waits, idle = Case("gpt2"), set[float](), set[tuple[int, float]]()
    wait, next_frame = Mailbox._wait, generation.take_frame

    def waiting(self: Any, ready: Any, deadline_s: float | None, what: str) -> None:
        waits.add(math.inf if deadline_s is None else deadline_s)
        wait(self, ready, deadline_s, what)

    def asking(link: Any, idle_s: float) -> Any:
        idle.add((threading.get_ident(), idle_s))
        return next_frame(link, idle_s)

    monkeypatch.setattr(Mailbox, "_wait", waiting)
    monkeypatch.setattr(generation, "take_frame", asking)
    monkeypatch.setattr(generation_driver, "take_frame", asking)
    with place(case) as driver:
        assert written(driver, PROMPTS[0], case.settings()) == case.unsplit(PROMPTS[0])
    assert {idle_s for _, idle_s in idle} == {IDLE_S}
    assert len(idle) == 1 + 2 + 2 + 1  # control unit, two devices in both directions, edge
    within_a_text_s = 20.0 * (1 + 2 * PATIENCE_PER_STAGE)
    assert {s for s in waits if s > within_a_text_s} <= {IDLE_S, math.inf}  # open, or idle


def test_a_device_that_dies_is_one_sentence_for_everyone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case("gpt2")

    def break_block(*_: object) -> Tensor:
        raise RuntimeError("board on fire")

    with (
        none_left(),
        pytest.raises(LinkError, match="board on fire"),
        local(case, slots=2) as driver,
    ):
        pieces = driver.generate(torch.tensor([PROMPTS[0]]), case.settings())
        next(pieces)
        monkeypatch.setattr(SegmentPart, "advance", break_block)
        list(pieces)
