"""Laws of every task: inputs padded and masked, outputs read back, one vocabulary for all."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets import Image as Pictures
from PIL import ExifTags, Image
from transformers import AutoImageProcessor

from collapipe_flwr.core.errors import ConfigError, DataError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data.classification import open_picture
from collapipe_flwr.data.config import TASK_CLASSES, TASK_COLUMNS, DataConfig
from collapipe_flwr.data.tasks import Task, load_task
from collapipe_flwr.data.tokenizer import Vocabulary
from tests.chats import chat_tokenizer, conversations, write_lines

MOODS = ["bad", "fine", "good"]


def write(path: Path, rows: list[tuple[str, ...]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


def moods(path: Path, *, size: int = 30, labels: list[str] = MOODS) -> str:
    rows = [(f"day {row} was{' so' * (row % 4)}", labels[row % len(labels)]) for row in range(size)]
    return write(path, [("text", "mood"), *rows])


def tagged(path: Path, *, size: int = 30) -> str:
    rows = [
        {
            "tokens": ["Anna", "Lee", *["saw"] * (row % 3), "Rome", "42"],
            "tags": ["B-PER", "I-PER", *["O"] * (row % 3), "B-LOC", "O"],
        }
        for row in range(size)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def pictures(folder: Path, *, size: int = 12) -> str:
    rng = np.random.default_rng(0)
    for row in range(size):
        place = folder / ("dark", "light")[row % 2] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        grey = rng.integers(0, 100, (9, 9)) + 150 * (row % 2)
        Image.fromarray(grey.astype(np.uint8)).save(place)
    return str(folder)


def speeches(path: Path, *, size: int = 30) -> str:
    rows = [
        {"who": f"s{row % 3}", "text": "to be or not" + " to be" * (row % 4)} for row in range(size)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def settings_of(name: str, folder: Path) -> DataConfig:
    if name == "number-words":
        return DataConfig(train_examples=40, test_examples=7)
    if name == "classification":
        train, test = moods(folder / "train.csv"), moods(folder / "test.csv", size=6)
        return DataConfig(task=name, train=train, test=test, label_column="mood")
    if name == "token-classification":
        return DataConfig(task=name, train=tagged(folder / "tags.jsonl"))
    if name == "image-classification":
        return DataConfig(task=name, train=pictures(folder / "pictures"), image_size=8)
    if name in ("masked-lm", "causal-lm"):
        train = speeches(folder / "speeches.jsonl")
        return DataConfig(task=name, train=train, partition_column="who", max_source_length=9)
    if name == "instruct":
        chat_tokenizer().save_pretrained(folder / "tokenizer")
        train = write_lines(folder / "chats.jsonl", conversations(30))
        return DataConfig(task=name, train=train, tokenizer=str(folder / "tokenizer"))
    rows = [("en", "de", "who"), *((f"I am {n}", f"Ich bin {n}", f"w{n % 3}") for n in range(30))]
    return DataConfig(
        task=name,
        train=write(folder / "pairs.csv", rows),
        source_column="en",
        target_column="de",
        partition="natural",
        partition_column="who",
    )


@pytest.fixture(params=sorted(TASK_CLASSES))
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    return load_task(settings_of(request.param, tmp_path))


def examples_of(task: Task) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = task.make_examples(task.train).to_list()
    return rows


def test_inputs_are_padded_to_the_longest_and_masked(task: Task) -> None:
    if not task.text_columns:
        pytest.skip("pictures all have one size")
    inputs = task.collate(examples_of(task)[:8])
    assert sorted(inputs) == ["attention_mask", "input_ids", "labels"]
    lengths = inputs["attention_mask"].sum(dim=1)
    assert inputs["input_ids"].shape == (8, lengths.max())
    pad = task.tokenizer.pad_token_id
    assert torch.equal(inputs["input_ids"] == pad, inputs["attention_mask"] == 0)
    assert all(tensor.dtype == torch.int64 for tensor in inputs.values())


def test_a_perfect_model_scores_best(task: Task) -> None:
    examples = task.make_examples(task.test).to_list()
    batch = task.collate(examples)
    predictions = task.read(perfect_guesses(task, batch["labels"]), batch)
    references = task.references(examples, batch)
    assert predictions == references
    wrong = [" ".join("?" for _ in reference.split()) for reference in references]
    best, worst = (task.score(task.count(p, references)) for p in (predictions, wrong))
    main = task.metric_name if task.metric_name in best else "accuracy"
    assert best[main] > worst[main]
    assert task.metric_name in {**best, **task.score_loss(1.0)}


def perfect_guesses(task: Task, labels: torch.Tensor) -> torch.Tensor:
    if task.model_task == "seq2seq":
        return labels.masked_fill(labels < 0, task.tokenizer.pad_token_id)
    if task.model_task == "causal-lm":
        labels = labels.roll(-1, dims=1)  # the guess at a place is for the next token
    return labels.clamp(min=0)


def test_a_control_unit_with_the_vocabulary_makes_the_same_inputs(task: Task) -> None:
    received = Vocabulary.from_json(task.vocabulary.to_json())
    unit = load_task(task.settings, received)
    examples = examples_of(task)[:5]
    for name, tensor in task.collate(examples).items():
        assert torch.equal(unit.collate(examples)[name], tensor)
    assert unit.labels == task.labels


def test_clusters_share_out_the_training_set(task: Task) -> None:
    parts = [task.partition(index, 3).to_list() for index in range(3)]
    rows = [str(row) for part in parts for row in part]
    assert sorted(rows) == sorted(str(row) for row in task.train.to_list())


def test_long_texts_are_cut_but_end_as_they_should() -> None:
    settings = DataConfig(train_examples=40, test_examples=1, max_source_length=3)
    task = load_task(settings)
    ids = task.collate(task.train.to_list())["input_ids"]
    assert ids.shape[1] == 3
    assert set(ids[:, 2].tolist()) <= {task.tokenizer.eos_token_id, task.tokenizer.pad_token_id}


def test_without_a_test_file_a_seeded_tenth_is_held_out(tmp_path: Path) -> None:
    settings = settings_of("translation", tmp_path)
    task, again = load_task(settings), load_task(settings)
    train, test = set(task.train["source"]), set(task.test["source"])
    assert (len(train), len(test), train & test) == (27, 3, set())
    assert set(again.test["source"]) == test


def test_subsets_are_seeded_and_not_the_head_of_the_file(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv")
    settings = DataConfig(
        task="classification", train=train, label_column="mood", train_examples=9, test_examples=4
    )
    task = load_task(settings)
    assert (len(task.train), len(task.test)) == (9, 4)
    assert task.train["text"][:] != [f"day {row} was{' so' * (row % 4)}" for row in range(9)]
    assert task.labels == tuple(MOODS)


@pytest.mark.parametrize("partition", ["natural", "dirichlet"])
def test_classification_goes_by_its_label(tmp_path: Path, partition: str) -> None:
    settings = DataConfig(
        task="classification",
        train=moods(tmp_path / "train.csv"),
        label_column="mood",
        partition=partition,
    )
    parts = [load_task(settings).partition(index, 2) for index in range(2)]
    assert sum(len(part) for part in parts) == 27
    assert set(parts[0]["label"]) != set(parts[1]["label"]) or partition == "dirichlet"


def test_labels_that_only_the_test_has(tmp_path: Path) -> None:
    settings = DataConfig(
        task="classification",
        train=moods(tmp_path / "train.csv"),
        test=moods(tmp_path / "test.csv", labels=["bad", "awful"]),
        label_column="mood",
    )
    with pytest.raises(DataError, match=r'data\.test has 1 labels .*"awful"'):
        _ = load_task(settings).test


def test_one_label_is_no_classification(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv", labels=["bad"])
    with pytest.raises(DataError, match=r'data\.label-column "mood" .*only'):
        _ = load_task(DataConfig(task="classification", train=train, label_column="mood")).labels


def test_quantities_are_no_classes(tmp_path: Path) -> None:
    """Similarities of sentence pairs, say: each number would be a class of its own."""
    file = moods(tmp_path / "sts.csv", labels=["0.25", "3", "4.5"])
    settings = DataConfig(task="classification", train=file, label_column="mood")
    with pytest.raises(DataError, match=r'data\.label-column "mood" holds numbers such as 0\.25'):
        _ = load_task(settings).labels


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["good", "good ", "bad"], ['"good" and "good "', "only in blanks or capitals"]),
        (["Good", "good", "bad"], ['"Good" and "good"', "only in blanks or capitals"]),
        (["good", "bad", "NaN"], ['the label "NaN" in 10 rows']),
        ([f"c{row}" for row in range(29)], ["29 labels in 30 rows"]),
        (["good", "bad"], []),
    ],
)
def test_what_may_be_a_mistake_in_labels_is_told(
    tmp_path: Path, labels: list[str], words: list[str]
) -> None:
    train = moods(tmp_path / "train.csv", labels=labels)
    task = load_task(DataConfig(task="classification", train=train, label_column="mood"))
    assert set(task.labels) == set(labels)
    assert len(task.warnings) == min(1, len(words))
    for word in words:
        assert word in task.warnings[0] and 'data.label-column "mood"' in task.warnings[0]


def test_a_label_of_its_own_in_every_row_is_no_class(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv", labels=[f"c{row}" for row in range(30)])
    with pytest.raises(DataError, match=r'data\.label-column "mood" .* each of 30 rows'):
        _ = load_task(DataConfig(task="classification", train=train, label_column="mood")).labels


@pytest.mark.parametrize("task", ["classification", "translation", "token-classification"])
def test_one_column_cannot_be_both_question_and_answer(task: str) -> None:
    names = [f"{name}_column" for name in TASK_COLUMNS[task]]
    with pytest.raises(ConfigError, match=r'^data\.\S+-column and data\.\S+ are both "mood"'):
        DataConfig(task=task, **dict.fromkeys(names, "mood"))  # type: ignore[arg-type]


def test_numbered_labels_keep_their_order(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv", labels=[str(number) for number in range(12)])
    task = load_task(DataConfig(task="classification", train=train, label_column="mood"))
    assert task.labels == tuple(str(number) for number in range(12))


def test_no_training_file_is_named() -> None:
    with pytest.raises(DataError, match=r"data\.train is empty"):
        _ = load_task(DataConfig(task="translation")).train


def test_testing_on_the_training_file_is_refused(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv")
    settings = DataConfig(task="classification", train=train, test=train, label_column="mood")
    with pytest.raises(DataError, match=r"data\.test .* is also data\.train"):
        _ = load_task(settings).test


def test_too_few_rows_to_hold_out(tmp_path: Path) -> None:
    train = moods(tmp_path / "train.csv", size=3)
    settings = DataConfig(task="classification", train=train, label_column="mood", test_examples=3)
    with pytest.raises(DataError, match=r"data\.train has 3 rows, too few"):
        _ = load_task(settings).train


def test_a_tag_stands_at_the_first_token_of_its_word(tmp_path: Path) -> None:
    task = load_task(DataConfig(task="token-classification", train=tagged(tmp_path / "tags.jsonl")))
    example = {"tokens": ["Anna", "Unheard-of-name", "\u200b", "Rome"], "tags": ["B-PER"] * 4}
    batch = task.collate([example])
    marked = (batch["labels"][0] != -100).nonzero().flatten()
    assert len(marked) == 4
    rests = [task.tokenizer.decode(batch["input_ids"][0, place:]).strip() for place in marked]
    assert [rest[0] for rest in rests] == ["A", "U", "\u200b", "R"]
    assert batch["input_ids"].shape[1] > 6  # words of several tokens, special tokens around
    cut = load_task(
        DataConfig(task="token-classification", train=task.settings.train, max_source_length=4),
        task.vocabulary,
    )
    seen = cut.read(torch.zeros(1, 4, dtype=torch.long), cut.collate([example]))
    assert 0 < len(seen[0].split()) < 4
    found = cut.score(cut.count(["B-PER"], ["B-PER B-LOC"]))
    assert found == {"f1": pytest.approx(2 / 3), "accuracy": 0.5}


def test_the_first_words_keep_their_tags_whatever_side_is_cut(tmp_path: Path) -> None:
    train = tagged(tmp_path / "tags.jsonl")
    whole = load_task(DataConfig(task="token-classification", train=train))
    whole.tokenizer.truncation_side = "left"
    whole.tokenizer.save_pretrained(tmp_path / "left")
    tokenizer = str(tmp_path / "left")
    settings = DataConfig(
        task="token-classification", train=train, tokenizer=tokenizer, max_source_length=6
    )
    task = load_task(settings)
    example = {"tokens": ["Anna", "Lee", "Rome", "saw"], "tags": ["B-PER", "I-PER", "B-LOC", "O"]}
    batch = task.collate([example])
    (found,) = task.read(batch["labels"], batch)
    assert found and "B-PER I-PER B-LOC O".startswith(found)
    place = int((batch["labels"][0] != -100).nonzero()[0])
    assert task.tokenizer.decode(batch["input_ids"][0, place:]).strip().startswith("A")


def test_conll_files_and_json_lines_mean_the_same(tmp_path: Path) -> None:
    lines = tagged(tmp_path / "tags.jsonl", size=12)
    rows = [json.loads(line) for line in Path(lines).read_text().splitlines()]
    text = "-DOCSTART- -X- O\n\n" + "\n\n".join(
        "\n".join(f"{w} x {t}" for w, t in zip(row["tokens"], row["tags"], strict=True))
        for row in rows
    )
    (tmp_path / "tags.conll").write_text(text)
    both = [
        load_task(DataConfig(task="token-classification", train=str(tmp_path / name)))
        for name in ("tags.jsonl", "tags.conll")
    ]
    assert both[0].train.to_list() == both[1].train.to_list()
    assert both[0].labels == both[1].labels == ("O", "B-LOC", "B-PER", "I-PER")


def masked(folder: Path, **values: Value) -> Task:
    train = speeches(folder / "speeches.jsonl")
    return load_task(DataConfig(task="masked-lm", train=train, **values))  # type: ignore[arg-type]


def test_masks_depend_on_the_example_and_the_round_but_not_on_the_batch(tmp_path: Path) -> None:
    task = masked(tmp_path)
    examples = examples_of(task)[:6]
    together = task.collate_for(examples, 3)
    for row, example in enumerate(examples):
        alone = task.collate_for([example], 3)
        size = alone["labels"].shape[1]
        for name, tensor in alone.items():
            assert torch.equal(together[name][row, :size], tensor[0]), name
    assert not torch.equal(task.collate_for(examples, 4)["labels"], together["labels"])


def test_a_share_of_the_tokens_is_masked_and_hidden(tmp_path: Path) -> None:
    task = masked(tmp_path, mask_share=0.5)
    batch = task.collate(examples_of(task))
    chosen = batch["labels"] != -100
    special = torch.isin(batch["labels"], torch.tensor(task.tokenizer.all_special_ids))
    assert not (special & chosen).any()
    ordinary = batch["attention_mask"].sum() - 2 * len(chosen)  # without begin and end
    assert 0.4 < chosen.sum() / ordinary < 0.6
    hidden = batch["input_ids"][chosen] == task.tokenizer.mask_token_id
    assert 0.6 < hidden.float().mean() < 0.95


def test_blocks_hold_every_token_once_and_mix_no_speakers(tmp_path: Path) -> None:
    train = speeches(tmp_path / "speeches.jsonl")
    test = speeches(tmp_path / "test.jsonl", size=3)
    settings = DataConfig(
        task="causal-lm", train=train, test=test, partition_column="who", max_source_length=9
    )
    task = load_task(settings)
    blocks = [row["ids"] for row in examples_of(task)]
    assert max(map(len, blocks)) == 9
    assert {len(block) for block in blocks[:-1]} >= {9}
    told = [text for who in ("s0", "s1", "s2") for text in by_speaker(train, who)]
    end = task.tokenizer.eos_token
    assert task.tokenizer.decode([i for block in blocks for i in block]) == "".join(
        text + end for text in told
    )


def by_speaker(path: str, who: str) -> list[str]:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return [row["text"] for row in rows if row["who"] == who]


def test_the_lines_of_a_text_file_are_examples(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("To be\n\n  \nor not to be,\nthat is\nthe question\n")
    task = load_task(
        DataConfig(task="causal-lm", train=str(tmp_path / "play.txt"), test_examples=1)
    )
    assert sorted([*task.train["text"], *task.test["text"]]) == [
        "To be",
        "or not to be,",
        "that is",
        "the question",
    ]


def test_empty_texts_are_nothing_to_learn_from(tmp_path: Path) -> None:
    rows = [("text", "who"), ("to be", "a"), ("", "a"), ("or not", "b"), (" ", "b"), ("x", "c")]
    settings = DataConfig(task="masked-lm", train=write(tmp_path / "t.csv", rows), test_examples=1)
    task = load_task(settings)
    assert set(task.train["text"]) | set(task.test["text"]) <= {"to be", "or not", "x"}
    with pytest.raises(
        DataError, match=r'2 of 5 rows .*data\.text-column "text" is empty in rows 2 and 4;'
    ):
        _ = load_task(replace(settings, task="classification", label_column="who")).train


@pytest.mark.parametrize("name", ["masked-lm", "causal-lm"])
def test_data_of_empty_texts_alone_is_refused_by_its_key(tmp_path: Path, name: str) -> None:
    texts, blanks = speeches(tmp_path / "texts.jsonl"), str(tmp_path / "blanks.jsonl")
    Path(blanks).write_text('{"text": " "}\n' * 3)
    for train, test, key in ((blanks, texts, "train"), (texts, blanks, "test")):
        task = load_task(DataConfig(task=name, train=train, test=test))
        with pytest.raises(DataError, match=rf'^data\.{key} has only empty texts in .*"text": '):
            getattr(task, key)


def test_held_out_rows_of_empty_texts_alone_are_not_called_data_test(tmp_path: Path) -> None:
    def held_out_of(name: str, texts: list[str]) -> list[str]:
        lines = "\n".join(json.dumps({"text": text}) for text in texts)
        (tmp_path / name).write_text(lines)
        settings = DataConfig(task="masked-lm", train=str(tmp_path / name))
        found: list[str] = load_task(settings).test["text"][:]
        return found

    texts = ["to be", "or not", "to be or", "not to be"]
    (held_out,) = held_out_of("all.jsonl", texts)
    with pytest.raises(DataError, match=r"^data\.train, in the held-out rows, has only empty"):
        held_out_of("less.jsonl", [" " if text == held_out else text for text in texts])


def test_texts_without_a_token_to_predict_are_refused(tmp_path: Path) -> None:
    task = load_task(settings_of("causal-lm", tmp_path))
    with pytest.raises(DataError, match=r'^data\.text-column "text" has no text of two tokens'):
        task.make_examples(Dataset.from_dict({"text": [""]}))


def test_folders_files_and_numbers_give_the_same_pictures(tmp_path: Path) -> None:
    folder = Path(pictures(tmp_path / "pictures"))
    files = sorted(folder.glob("*/*.png"))
    rows = [("image", "label"), *((str(f.relative_to(tmp_path)), f.parent.name) for f in files)]
    names = write(tmp_path / "names.csv", rows)
    numbers = tmp_path / "numbers.jsonl"
    lines = [{"image": np.asarray(Image.open(f)).tolist(), "label": f.parent.name} for f in files]
    numbers.write_text("\n".join(map(json.dumps, lines)))

    def pixels(train: str) -> torch.Tensor:
        task = load_task(DataConfig(task="image-classification", train=train, image_size=8))
        rows = [*task.train.to_list(), *task.test.to_list()]
        return task.collate(rows)["pixel_values"].flatten(1).sort(dim=0).values

    first = pixels(str(folder))
    assert first.shape == (12, 3 * 8 * 8)
    assert first.min() >= -1 and first.max() <= 1
    assert torch.equal(first, pixels(names))
    assert torch.equal(first, pixels(str(numbers)))


def test_a_saved_preprocessor_makes_the_same_pictures(tmp_path: Path) -> None:
    settings = DataConfig(
        task="image-classification",
        train=pictures(tmp_path / "pictures"),
        image_size=8,
        image_mean=(0.4, 0.5, 0.6),
        image_std=(0.3,),
    )
    task = load_task(settings)
    task.save_inputs(tmp_path)
    examples = task.train.to_list()
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    files = [Image.open(example["image"]["path"]).convert("RGB") for example in examples]
    theirs = processor(files, return_tensors="pt")["pixel_values"]
    assert torch.allclose(task.collate(examples)["pixel_values"], theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tags": ["O"]}, r"4 of 4 rows .*data\.tags-column .* as words in rows 1, 2, 3 and 4;"),
        ({"tags": ["a b", "O"]}, r'the tag "a b": tags hold no spaces'),
        ({"tokens": []}, r"has not as many tags as words in rows 1, 2"),
        ({"tags": ["O", None]}, r'data\.tags-column "tags" of .* holds None where one word'),
        ({"tags": [["O"], ["O"]]}, r"holds \['O'\] where one word or tag should stand"),
        ({"tags": 3}, r'data\.tags-column "tags" of .* holds 3 where a row.s words or tags'),
        ({"tokens": {"a": "b"}}, r"holds \{'a': 'b'\} where a row.s words or tags"),
    ],
)
def test_bad_tags_are_one_sentence(
    tmp_path: Path, values: dict[str, list[Any]], sentence: str
) -> None:
    row = {"tokens": ["Anna", "Lee"], "tags": ["B-PER", "O"], **values}
    (tmp_path / "tags.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    with pytest.raises(DataError, match=sentence):
        _ = load_task(
            DataConfig(task="token-classification", train=str(tmp_path / "tags.jsonl"))
        ).train


def test_no_picture_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("no picture")
    Image.new("L", (99, 99)).save(tmp_path / "c.png")
    whole = (tmp_path / "c.png").read_bytes()
    (tmp_path / "d.png").write_bytes(whole[:-30])  # begins as a picture
    names = [("a.png", "x"), ("c.png", "y"), ("b.png", "y"), ("c.png", "x"), ("c.png", "x")]
    train = write(tmp_path / "names.csv", [("image", "label"), *names])
    settings = DataConfig(task="image-classification", train=train, test_examples=1)
    with pytest.raises(DataError, match=r'2 of 5 .*"image" is not a picture .* in rows 1 and 3;'):
        _ = load_task(settings).train
    assert len(load_task(replace(settings, skip_bad_rows=True)).every_row) == 3
    with pytest.raises(DataError, match=r"d\.png is not a picture that Pillow reads"):
        open_picture({"bytes": None, "path": str(tmp_path / "d.png")})


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_pictures_of_16_bits_keep_their_shades(tmp_path: Path, suffix: str) -> None:
    grey = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    place = tmp_path / f"deep.{suffix}"
    Image.fromarray(grey).save(place)
    opened = open_picture({"bytes": None, "path": str(place)})
    assert np.array_equal(np.asarray(opened.convert("L")), np.rint(grey / 257))


@pytest.mark.parametrize("turn", range(1, 9))
def test_pictures_stand_as_the_camera_was_held(tmp_path: Path, turn: int) -> None:
    rng = np.random.default_rng(0)
    seen = Image.fromarray(rng.integers(0, 255, (4, 6, 3)).astype(np.uint8))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = turn
    seen.save(tmp_path / "a.png", exif=exif)
    opened = open_picture({"bytes": None, "path": str(tmp_path / "a.png")})
    theirs = Dataset.from_dict({"a": [str(tmp_path / "a.png")]}).cast_column("a", Pictures())
    assert np.array_equal(np.asarray(opened), np.asarray(theirs[0]["a"]))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"])
def test_pictures_of_every_kind_are_read(tmp_path: Path, mode: str) -> None:
    picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
    rgba = picture.convert("RGB" if mode in ("LAB", "PA", "YCbCr", "HSV", "CMYK") else "RGBA")
    place = tmp_path / f"a.{'tiff' if mode in ('LAB', 'YCbCr', 'CMYK') else 'png'}"
    try:
        rgba.convert(mode).save(place)
    except (ValueError, OSError):
        pytest.skip("Pillow does not write it")
    train = write(tmp_path / "names.csv", [("image", "label"), *[(place.name, c) for c in "xyxy"]])
    task = load_task(DataConfig(task="image-classification", train=train, image_size=8))
    assert task.collate(task.train.to_list())["pixel_values"].shape == (3, 3, 8, 8)


def test_pictures_of_fractions_are_one_sentence(tmp_path: Path) -> None:
    place = tmp_path / "shares.tiff"
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(place)
    with pytest.raises(DataError, match=r"shares\.tiff .* must be whole ones from 0 to 255"):
        open_picture({"bytes": None, "path": str(place)})


@pytest.mark.parametrize("number", [300, -1, 0.5])
def test_numbers_that_are_no_pixels_are_one_sentence(tmp_path: Path, number: float) -> None:
    rows = [{"image": [[1, 2], [3, number]], "label": row % 2} for row in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = DataConfig(task="image-classification", train=str(tmp_path / "rows.jsonl"))
    task = load_task(settings)
    with pytest.raises(DataError, match="must be whole ones from 0 to 255"):
        task.collate(task.train.to_list())


def test_universal_dependencies_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ud.conll").write_text("# sent_id = 1\n1\tEU\teu\tPROPN\n\n")
    settings = DataConfig(task="token-classification", train=str(tmp_path / "ud.conll"))
    with pytest.raises(DataError, match="'# sent_id = 1' in line 1, as CoNLL-U files do"):
        _ = load_task(settings).train


@pytest.mark.parametrize("damaged", ["", "[]", '{"labels": []}'])
def test_a_damaged_vocabulary_is_an_error(damaged: str) -> None:
    with pytest.raises(DataError, match="damaged"):
        Vocabulary.from_json(damaged)
