"""Attacks find what is there, nothing where nothing is, on frames that the pipeline sent."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from benchmarks.privacy import report
from benchmarks.privacy.document import rendered
from benchmarks.privacy.noise import measure_noise
from benchmarks.privacy.recording import Recording, coded, compute_hidden, record
from benchmarks.privacy.report import advice, least_depth, measure, recovery
from benchmarks.privacy.study import Sizes, Study, read_studies
from benchmarks.privacy.tokens import Inverter, Read, Search, share
from benchmarks.privacy.updates import area, attack_labels, attack_update
from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.tokenizer import train_tokenizer
from collapipe_flwr.federation.privacy_account import Charge, count_epsilon
from collapipe_flwr.models.splitter import Splitter
from tests.chats import chat_tokenizer
from tests.closeness import near

WORDS = [f"{first}{second}" for first in "bdfgklmn" for second in ("ab", "ed", "ig", "ok", "um")]
SIZES = Sizes(cuts=(0, 1, 2), batch=4, steps=4, public_texts=60, sentences=1, rank=2)


def write_table(path: Path, columns: list[str], rows: list[list[str]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return str(path)


def texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.sample(WORDS, 5)) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Public texts beside models."""
    path = tmp_path_factory.mktemp("privacy")
    write_table(path / "public.csv", ["en"], [[text] for text in texts(80, 1)])
    return path


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Study:
    """A tiny BERT on texts of three labels."""
    checkpoint = folder / "bert"
    tokenizer = train_tokenizer(WORDS * 9, vocab_size=400, starts_with_bos=True)
    tokenizer.save_pretrained(checkpoint)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = BertConfig(
        vocab_size=len(tokenizer), intermediate_size=24, max_position_embeddings=32, **sizes
    )
    BertModel(config).save_pretrained(checkpoint)
    labelled = [[text, f"c{row % 3}"] for row, text in enumerate(texts(120, 2))]
    return Study(
        name="tiny",
        data=DataConfig(
            task="classification",
            train=write_table(folder / "labelled.csv", ["text", "label"], labelled),
            tokenizer=str(checkpoint),
            max_source_length=16,
        ),
        checkpoint=str(checkpoint),
        public=str(folder / "public.csv"),
        sizes=SIZES,
    )


@pytest.fixture(scope="module")
def chat(folder: Path) -> Study:
    """A tiny Llama on conversations."""
    checkpoint = folder / "llama"
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(checkpoint)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), intermediate_size=24, tie_word_embeddings=True, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(checkpoint)
    rows = [{"instruction": t, "output": t[::-1]} for t in texts(60, 3)]
    (folder / "chats.json").write_text(json.dumps(rows))
    return Study(
        name="chat",
        data=DataConfig(
            task="instruct",
            train=str(folder / "chats.json"),
            tokenizer=str(checkpoint),
            max_source_length=64,
        ),
        checkpoint=str(checkpoint),
        public=str(folder / "public.csv"),
        sizes=replace(SIZES, searched=2, candidates=len(tokenizer)),
    )


@pytest.fixture(scope="module")
def recorded(classifier: Study) -> tuple[Splitter, Recording]:
    splitter = classifier.splitter()
    return splitter, record(classifier, splitter, classifier.batches(classifier.examples(0)))


def test_every_link_is_tapped_and_shows_what_the_parts_compute(
    recorded: tuple[Splitter, Recording],
) -> None:
    splitter, seen = recorded
    ((batch, expected),) = compute_hidden(splitter, seen.before, seen.batches[:1], SIZES.cuts)
    for depth in SIZES.cuts:
        assert len(seen.hidden[depth]) == len(seen.gradients[depth]) == SIZES.steps
        torch.testing.assert_close(seen.hidden[depth][0], expected[depth])
    edge = splitter.build_edge(seen.before)
    hidden = expected[2].clone().requires_grad_()
    edge(hidden, splitter.context(batch)).backward()
    torch.testing.assert_close(seen.gradients[2][0], hidden.grad)


def test_a_codec_leaves_of_a_frame_what_a_receiver_reads(
    recorded: tuple[Splitter, Recording],
) -> None:
    hidden = recorded[1].hidden[1][0]
    errors = [float((coded(hidden, c) - hidden).abs().max()) for c in ("fp32", "fp16", "int4")]
    assert errors[0] == 0 < errors[1] < errors[2]


def test_only_the_users_own_tokens_count(chat: Study) -> None:
    batches = chat.batches(chat.examples(0))[:1]
    (mask,) = chat.content(batches)
    ids = batches[0]["input_ids"]
    assert chat.start(batches) >= 3  # <|im_start|>user\n
    shown = chat.task.tokenizer.decode(ids[0][mask[0]])
    assert "user" not in shown and "assistant" not in shown and "<|" not in shown
    assert 10 < int(mask[0].sum()) < len(ids[0])


def test_scrambled_texts_hold_the_whole_vocabulary_where_users_wrote(chat: Study) -> None:
    natural = list(chat.public_batches())
    scrambled, masks = chat.scramble(natural), chat.content(natural)
    drawn = set()
    for before, after, mask in zip(natural, scrambled, masks, strict=True):
        assert torch.equal(before["input_ids"][~mask], after["input_ids"][~mask])
        assert torch.equal(before["attention_mask"], after["attention_mask"])
        drawn |= set(after["input_ids"][mask].tolist())
    tokenizer = chat.task.tokenizer
    assert len(drawn) > 0.9 * len(tokenizer)
    assert not drawn & set(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))


def test_nobody_is_member_and_not(classifier: Study) -> None:
    members, others = (classifier.examples(cluster) for cluster in (0, 1))
    assert len(members) == len(others) == SIZES.examples
    assert not {e["text"] for e in members} & {e["text"] for e in others}


def test_search_among_all_tokens_reads_a_text_whole(chat: Study) -> None:
    splitter = chat.splitter()
    weights, _ = splitter.first_weights(0)
    batch = chat.batches(chat.examples(0))[0]
    ((_, hidden),) = compute_hidden(splitter, weights, [batch], SIZES.cuts)
    model: Any = splitter.build_whole(weights)
    stop = int(batch["attention_mask"][0].sum())
    ids = batch["input_ids"][0, :stop]
    every = torch.arange(len(chat.task.tokenizer)).expand(stop, -1)
    for depth in (1, 2):
        found = Search(model, depth).read(hidden[depth][0, :stop], every, ids[:3])
        assert found.tolist() == ids.tolist()
    assert len(model.get_decoder().layers) == 2  # as before


def test_an_inverter_finds_a_leak_and_learns_nothing_from_shuffled_tokens() -> None:
    torch.manual_seed(1)
    table = torch.randn(50, 64)
    public, victims = (
        Read(torch.randn(600, 64), torch.randint(50, (600,))).planted(table) for _ in range(2)
    )
    found = Inverter(64, table).fit(public, 3).read(victims.hidden)
    assert share(found, victims.tokens) > 0.95
    found = Inverter(64, table).fit(public.shuffled(), 3).read(victims.hidden)
    assert share(found, victims.tokens) < 0.1
    assert share(Inverter(64, table).read(victims.hidden), victims.tokens) < 0.2


def test_labels_are_read_from_gradients(recorded: tuple[Splitter, Recording]) -> None:
    found = attack_labels(recorded[1])
    assert found.gradients[2] > 0.7 and set(found.gradients) == set(found.hidden) == {0, 1, 2}
    assert found.controls["planted"] == 1.0 and found.examples == 8


def test_areas_count_pairs() -> None:
    higher, lower = torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0])
    assert area(higher, lower) == near((1 + 1 + 0 + 0.5) / 4)
    assert area(higher, lower, torch.eye(2, dtype=torch.bool)) == near((1 + 0.5) / 2)


@pytest.mark.parametrize("adapted", [False, True])
def test_full_updates_name_every_word_of_members(classifier: Study, adapted: bool) -> None:
    splitter = classifier.splitter(adapted=adapted)
    members, others = (classifier.batches(classifier.examples(c)) for c in (0, 1))
    # what both sides have names nobody: each must have words of its own
    for batch in members:
        batch["input_ids"][:, -2] = 7
    for batch in others:
        batch["input_ids"][:, -2] = 8
    content = [batch["input_ids"] > 0 for batch in (*members, *others)]
    seen = record(classifier, splitter, members)
    found = attack_update(splitter, seen, others, content)
    assert found.controls["planted members"] == 1.0
    assert found.label_alone is not None and 0 < found.pairs < SIZES.examples**2
    if not adapted:
        assert found.words == 1.0
    else:
        assert 0 <= found.words <= 1


def test_the_bench_tells_everything_of_a_study(
    chat: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced = {0: 10.0, 1: 12.0, 2: None}
    monkeypatch.setattr(report, "_seconds", lambda *_: {"control unit": priced})
    told = json.loads(json.dumps(dict(measure(chat))))
    assert list(told) == ["study", "tokens", "labels", "updates", "controls", "seconds"]
    rates = told["tokens"]["rates"]
    assert list(rates) == ["0", "1", "2"] and set(rates["2"]) == {"nearest", "inverter", "search"}
    assert rates["0"]["inverter"]["fp32"] > 0.9 and rates["1"]["search"]["fp32"] > 0.9
    assert told["updates"]["full"]["label_alone"] is None
    named = {control["name"]: control for control in told["controls"]}
    assert named["tokens, untrained"]["held"] and named["full: members, planted"]["held"]
    assert "no depth keeps recovery at 0%" in advice(told, 0.0)
    deepest = recovery(told)[2]
    said = advice(told, max(recovery(told).values()))
    assert "trusted-blocks=0 is the least" in said and "control unit 1.00" in said
    assert 0 < deepest <= 1


def test_noise_hides_tokens_and_is_counted_by_visit(classifier: Study) -> None:
    pytest.importorskip("dp_accounting")
    told = json.loads(json.dumps(dict(measure_noise(classifier, (0.0, 0.05, 10.0)))))
    plain, some, much = told["noise"]
    assert told["study"]["depth"] == 1 and told["study"]["norm"] > 0
    assert plain["epsilon"] is None and some["epsilon"] > much["epsilon"] > 0
    due = Charge(examples=SIZES.examples, batch=SIZES.examples, noise_multiplier=10.0, steps=2)
    assert much["epsilon"] == count_epsilon([due], 1e-5)
    assert plain["inverter"] > 0.9 > 0.4 > much["inverter"]  # a third are one token
    assert 0 <= much["accuracy"] <= 1
    page = rendered("<!-- table privacy-noise -->\n<!-- end -->", [{**told, "controls": []}])
    assert "| 0.05 |" in page


def test_the_least_depth_has_no_worse_one_behind_it() -> None:
    rates = {0: 1.0, 1: 0.4, 2: 0.6, 3: 0.5, 4: 0.3}
    assert least_depth(rates, 0.5) == 3
    assert least_depth(rates, 1.0) == 0
    assert least_depth(rates, 0.2) is None


@pytest.mark.parametrize(
    ("names", "told"),
    [("nothing", "--studies must list"), ("instructions", "--smollm2 .* is no folder")],
)
def test_what_is_not_there_is_said(tmp_path: Path, names: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_studies(names, tmp_path, tmp_path / "smollm2")


def test_data_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no instructions/instructions\.json"):
        read_studies("instructions", tmp_path, tmp_path)
