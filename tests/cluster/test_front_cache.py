"""Law: what is kept of frozen blocks changes no result, whatever happens to it or to the round."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from collapipe_flwr.cluster.control_unit import ClusterResult, evaluate_batches, train_round
from collapipe_flwr.cluster.evaluation import PredictionConfig
from collapipe_flwr.cluster.fleet import ThreadFleet
from collapipe_flwr.cluster.front_cache import KeptStates, find_folder
from collapipe_flwr.cluster.hosted import ThreadEdge
from collapipe_flwr.core.measurements import CacheUse
from collapipe_flwr.models.describing import keep_frozen
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import CacheConfig
from tests.closeness import assert_near, assert_same, near
from tests.cluster.faults import Fault, failing
from tests.full_disk import full_disk
from tests.rounds import (
    ADAMW,
    BLOCKS,
    Batch,
    Cut,
    make_splitter,
    micro_batches,
    order_of,
    recovery,
    steps_of,
)

FROZEN = 3
ABOVE = Cut(stops=(1, 2), micro_batches=(2, 1), schedule="1f1b")
ALL = Cut(stops=(2, FROZEN, BLOCKS), micro_batches=(2, 1), schedule="1f1b")
EXAMPLES, BYTES = 9, 8 * 16 * 4  # of STEPS steps; bytes of a state at most, without its header
STEPS = 3
KEPT = CacheConfig(max_gb=1.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return find_folder()


@pytest.fixture(params=["bert", "marian"])
def on_devices(request: pytest.FixtureRequest) -> Splitter:
    """A model whose frozen blocks are on devices."""
    spec = make_splitter(request.param, dropout=0.0).spec
    return Splitter(replace(spec, frozen=Splitter(spec).front_keys(FROZEN)))


@pytest.fixture
def splitter(on_devices: Splitter) -> Splitter:
    return Splitter(keep_frozen(on_devices.spec))


@pytest.fixture
def first(splitter: Splitter) -> dict[str, Tensor]:
    return splitter.initial_weights(seed=1)


def run(
    splitter: Splitter,
    first: dict[str, Tensor],
    *,
    cache: CacheConfig = KEPT,
    steps: list[list[Batch]] | None = None,
    faults: tuple[Fault, ...] = (),
    every: int = 0,
    audits: float = 0.0,
) -> ClusterResult:
    cut = ABOVE if splitter.held_blocks else ALL
    order = order_of(cut, first, ADAMW, every=every)
    order = replace(order, learning=replace(order.learning, cache=cache, audit_share=audits))
    batches = micro_batches(splitter, steps or steps_of(splitter, cut, STEPS))
    fleet = ThreadFleet(ThreadEdge(), failing(*faults)) if faults else ThreadFleet(ThreadEdge())
    plans = recovery(splitter) if faults or audits else None
    return train_round(splitter, order, batches, fleet, recovery=plans)


def use_of(result: ClusterResult) -> CacheUse:
    return result.reports[0].cache


def test_losses_and_weights_are_those_of_frozen_blocks_on_devices(
    on_devices: Splitter, splitter: Splitter, first
) -> None:
    wanted = run(on_devices, first)
    computed, read = run(splitter, first), run(splitter, first)
    for result in (computed, read):
        assert result.losses == wanted.losses
        assert_same(dict(result.weights), dict(wanted.weights))
    assert use_of(computed) == CacheUse(misses=EXAMPLES, stored=EXAMPLES)
    assert (use_of(read).hits, use_of(read).misses) == (EXAMPLES, 0)
    assert use_of(read).spared_s > 0
    assert not any(torch.equal(read.weights[k], first[k]) for k in splitter.segment_keys(0, 2))


def test_examples_are_known_in_other_company_and_with_other_padding(
    on_devices: Splitter, splitter: Splitter, first
) -> None:
    before = steps_of(splitter, ABOVE, STEPS)
    rows = [
        {name: tensor[row] for name, tensor in part.items()}
        for step in before
        for part in step
        for row in range(len(part["input_ids"]))
    ]
    rows.sort(key=lambda row: int(row["attention_mask"].sum()))

    def joined(some: list[Batch]) -> Batch:
        width = max(int(row["attention_mask"].sum()) for row in some)
        found = {name: torch.stack([row[name] for row in some]) for name in some[0]}
        cut = {name: found[name][:, :width] for name in ("input_ids", "attention_mask")}
        return {**found, **cut}

    after = [[joined(rows[i : i + 2]), joined(rows[i + 2 : i + 3])] for i in (0, 3, 6)]
    assert {part["input_ids"].shape[1] for step in after for part in step} != {8}
    run(splitter, first, steps=before)
    found, wanted = run(splitter, first, steps=after), run(on_devices, first, steps=after)
    assert (use_of(found).hits, use_of(found).misses) == (EXAMPLES, 0)
    assert found.losses == near(wanted.losses)
    assert_near(dict(found.weights), dict(wanted.weights), depth=STEPS)


def test_nothing_of_the_frozen_part_is_even_built_where_all_is_kept(
    splitter: Splitter, first, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run(splitter, first)
    monkeypatch.setattr(Splitter, "build_front", None)
    assert run(splitter, first).losses == wanted.losses


def test_other_weights_another_model_and_other_tokens_are_computed(
    splitter: Splitter, first, folder: Path
) -> None:
    run(splitter, first)
    key = splitter.embedding_keys()[-1]
    other = {**first, key: first[key] + 1e-6}
    assert use_of(run(splitter, other)).hits == 0
    settings = splitter.spec.config_json
    name = "activation_function" if "activation_function" in settings else "hidden_act"
    changed = settings.replace(f'"{name}": ', f'"{name}": "relu", "was": ')
    assert changed != settings
    assert use_of(run(Splitter(replace(splitter.spec, config_json=changed)), first)).hits == 0
    steps = steps_of(splitter, ABOVE, STEPS)
    steps[1][0]["input_ids"][1, 0] += 1
    assert use_of(run(splitter, first, steps=steps)).misses == 1
    trained = {**first, splitter.edge_keys()[0]: first[splitter.edge_keys()[0]] * 2}
    assert use_of(run(splitter, trained)).misses == 0  # what is behind does not matter
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("damage", ["torn", "changed", "empty", "swapped"])
def test_a_damaged_file_is_computed_again(
    splitter: Splitter, first, folder: Path, damage: str, caplog
) -> None:
    wanted = run(splitter, first)
    one, other, *_ = sorted(folder.glob("*/*"))
    content = one.read_bytes()
    change = bytearray(content)
    change[-1] ^= 1
    spoilt = {"torn": content[:-7], "changed": bytes(change), "empty": b""}
    one.write_bytes(other.read_bytes() if damage == "swapped" else spoilt[damage])
    found = run(splitter, first)
    assert found.losses == wanted.losses
    assert (use_of(found).misses, use_of(found).stored) == (1, 1)
    assert "is damaged: its example is computed again" in caplog.text
    assert use_of(run(splitter, first)).misses == 0


def test_an_approximate_codec_is_the_same_at_every_visit(splitter: Splitter, first) -> None:
    exact, coded = run(splitter, first), replace(KEPT, codec="int8")
    computed, read = run(splitter, first, cache=coded), run(splitter, first, cache=coded)
    assert use_of(computed).hits == 0 and use_of(read).hits == EXAMPLES
    assert computed.losses == read.losses != exact.losses
    assert_same(dict(computed.weights), dict(read.weights))
    assert computed.losses == pytest.approx(exact.losses, rel=1e-2)


def test_the_folder_holds_no_more_than_allowed_and_what_is_not_used_makes_room(
    splitter: Splitter, first, folder: Path
) -> None:
    wanted = run(splitter, first, cache=CacheConfig())
    small = replace(KEPT, max_gb=4 * BYTES / 1e9)
    for _ in range(2):
        found = run(splitter, first, cache=small)
        assert found.losses == near(wanted.losses)
        assert 0 < sum(f.stat().st_size for f in folder.glob("*/*")) <= 4 * BYTES
    kept = use_of(found).hits
    assert 0 < kept < EXAMPLES and use_of(found).stored == 0
    key = splitter.embedding_keys()[0]
    other = {**first, key: first[key] * 2}
    assert use_of(run(splitter, other, cache=small)).stored == kept
    assert len(list(folder.iterdir())) == 1
    assert sum(f.stat().st_size for f in folder.glob("*/*")) <= 4 * BYTES


def test_a_full_disk_costs_time_alone(splitter: Splitter, first, caplog) -> None:
    wanted = run(splitter, first, cache=CacheConfig())
    with full_disk(most_bytes=64):
        found = run(splitter, first)
    assert found.losses == near(wanted.losses) and use_of(found).stored == 0
    said = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) == 1 and "hidden states cannot be kept in" in said[0].getMessage()


@pytest.mark.parametrize("every", [0, 1])
def test_a_device_that_dies_changes_nothing(splitter: Splitter, first, every: int) -> None:
    wanted = run(splitter, first)
    fault = Fault(step=1, device_id="A/d1", phase="forward")
    found = run(splitter, first, faults=(fault,), every=every)
    assert [incident.lost for incident in found.incidents] == [("A/d1",)]
    assert found.losses == near(wanted.losses)
    assert_near(dict(found.weights), dict(wanted.weights), depth=STEPS)
    assert (use_of(found).hits, use_of(found).misses) == (EXAMPLES, 0)


@pytest.mark.parametrize("examples", [EXAMPLES, 4])
def test_audits_believe_what_is_kept(splitter: Splitter, first, examples: int) -> None:
    cache = replace(KEPT, max_gb=examples * (BYTES + 64) / 1e9)
    computed, read = (run(splitter, first, cache=cache, audits=1.0) for _ in range(2))
    assert not computed.incidents and not read.incidents
    assert computed.losses == read.losses
    assert_same(dict(computed.weights), dict(read.weights))
    assert use_of(read).hits >= min(examples, EXAMPLES)


def test_an_evaluation_reads_what_training_kept_and_counts_nothing(
    splitter: Splitter, first, folder: Path
) -> None:
    run(splitter, first)
    order = order_of(ABOVE, first, ADAMW)
    batches = micro_batches(splitter, steps_of(splitter, ABOVE, STEPS))
    fleet = ThreadFleet(ThreadEdge())
    wanted = evaluate_batches(splitter, order, batches, fleet)
    files = sorted(folder.glob("*/*"))
    order = replace(order, learning=replace(order.learning, cache=KEPT))
    assert evaluate_batches(splitter, order, batches, fleet) == wanted
    assert sorted(folder.glob("*/*")) == files


def test_texts_are_generated_alike(folder: Path) -> None:
    spec = make_splitter("marian", dropout=0.0).spec
    there = Splitter(replace(spec, frozen=Splitter(spec).front_keys(FROZEN)))
    here = Splitter(keep_frozen(there.spec))
    first = there.initial_weights(seed=1)
    wanted = PredictionConfig(most_tokens=5)
    found = []
    for splitter, cut in ((there, ALL), (here, ABOVE)):
        order = order_of(cut, first, ADAMW)
        order = replace(order, learning=replace(order.learning, cache=KEPT))
        batches = micro_batches(splitter, steps_of(splitter, cut, 1))
        result = evaluate_batches(
            splitter, order, batches, ThreadFleet(ThreadEdge()), wanted=wanted
        )
        found.append([text.tolist() for step in result.predictions for text in step])
    assert found[0] == found[1] and found[0]
    assert not folder.exists()  # they are not asked for a second time


def test_drafts_of_killed_writers_are_removed(tmp_path: Path) -> None:
    kept = KeptStates(tmp_path, "part", KEPT)
    kept.write("a", torch.ones(2, 3), 0.5)
    old, new = (tmp_path / "part" / f"{name}.1.partial" for name in ("b", "c"))
    for draft in (old, new):
        draft.write_bytes(b"half")
    os.utime(old, (0, 0))
    again = KeptStates(tmp_path, "part", KEPT)
    again.write("d", torch.ones(2, 3), 0.5)
    assert not old.exists() and new.exists()
    found = again.read("a")
    assert found is not None and torch.equal(found.state, torch.ones(2, 3))
    assert found.computed_s == 0.5
