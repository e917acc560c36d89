"""What is seen at once is refused at once: before any large library is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from collapipe_flwr.config.parsing import declared_config
from collapipe_flwr.core.errors import CollaPipeError, ModelError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data.config import TASK_CLASSES, TASK_COLUMNS, DataConfig
from collapipe_flwr.federation.run.first_look import check_paths, look
from collapipe_flwr.models.families import FAMILIES
from collapipe_flwr.models.spec import MODEL_TYPES, ModelConfig, check_settings
from collapipe_flwr.pipeline.optimizer_settings import list_rule_names
from collapipe_flwr.pipeline.update_rules import list_torch_names
from tests.federation.wrong_inputs import ROWS

PROJECT = Path(__file__).parents[3]
SLOW = ("torch", "transformers", "datasets", "pandas")
LARGE = (*SLOW, "flwr", "grpc", "numpy")
SCRIPT = """
import json, sys
from collapipe_flwr.cli import main
before = set(sys.modules)
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print(end.code)
print(*(name for name in set(sys.modules) - before))
"""
TASK = ["-c", "data.task=classification"]
CHECK = ["check-config", str(PROJECT), *TASK, "-c"]
GENERATE = ["generate", "--text"]
MISSING = [
    [*CHECK, "data.train=nope.csv"],
    [*CHECK, "data.train={}/good.csv", "-c", "data.label-column=mood"],
    [*CHECK, "data.train={}/good.csv", "-c", "data.max-source-length=1"],
    [*CHECK, "data.train={}/good.csv", "-c", "model.pretrained={}/nope"],
    [*CHECK, "data.train={}/good.csv", "-c", "model.pretrained={}"],
    [*CHECK, "data.train={}/good.csv", "-c", "model.type=brt"],
    [*CHECK, "data.train={}/good.csv", "-c", "data.tokenizer={}/nope"],
    [*CHECK, "data.trian={}/good.csv"],
    [*GENERATE, " ", "--run", "{}"],
    [*GENERATE, "a", "--run", "{}/nope"],
    [*GENERATE, "a", "--run", "{}", "--listen", "127.0.0.1:70000"],
]
OF_A_RUN = [
    ["check-config", str(PROJECT), "-c", wrong]
    for wrong in (
        "train.learning-rate=-1",
        "train.optimizer=adamm",
        "train.optimizer=LBFGS",
        "train.optimizer-arguments=betta=1",
        "scheduler.policy=dsda",
        "scheduler.micro-batches=0",
        "world.devices=raspbery-pi-4",
        "strategy=fedavgg",
        "strategy-arguments=eta=5",
        "lora.rank=2",
        "round-late=join",
        "model.overrides=d_model=32 encoder_layerz=2",
    )
]


@pytest.mark.parametrize(("wrong", "large"), [(MISSING, LARGE), (OF_A_RUN, SLOW)])
def test_a_wrong_name_is_refused_before_large_libraries_are_loaded(
    wrong: list[list[str]], large: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "good.csv").write_text(f"text,label\n{ROWS}")
    words = json.dumps(wrong).replace("{}", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    *codes, loaded = done.stdout.splitlines()
    assert len(codes) == len(wrong) and set(codes) <= {"1", "2"}
    assert "Traceback" not in done.stderr and done.stderr.count("Error: ") == len(wrong)
    assert not set(large) & set(loaded.split())


def test_the_names_that_are_read_from_sources_are_those_of_the_libraries() -> None:
    of_torch = (name for name in list_torch_names() if name not in ("LBFGS", "SparseAdam"))
    assert list_rule_names() == ("adamw", "sgd", *of_torch)
    assert tuple(FAMILIES) == MODEL_TYPES
    for name in CONFIG_MAPPING:
        check_paths(DataConfig(), ModelConfig(type=name, overrides=""))


@pytest.mark.parametrize("name", ["deberta-v2", "modernbert", "t5", "whisper"])
def test_no_setting_that_a_type_has_is_refused(name: str) -> None:
    config = CONFIG_MAPPING[name]
    known = {*config().to_dict(), *config.attribute_map, *FAMILIES[name].settings}
    check_settings(known, name)
    with pytest.raises(ModelError, match="no setting 'n_blockz'"):
        check_settings([*known, "n_blockz"], name)


@pytest.mark.parametrize("task", sorted(TASK_COLUMNS))
def test_the_columns_of_a_task_are_those_that_it_reads(task: str) -> None:
    module, _, name = TASK_CLASSES[task].partition(":")
    kind = getattr(import_module(f"collapipe_flwr.data.{module}"), name)
    assert kind.columns == TASK_COLUMNS[task]
    own = {"number-words", "instruct"}  # data of its own, and rows of several kinds
    assert TASK_CLASSES.keys() - TASK_COLUMNS.keys() == own


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "text,label\nx,y\n"),
        ("a.tsv", "text\tlabel\nx\ty\n"),
        ("a.jsonl", '{"text": "x"}\n{"label": "y"}\n'),
        ("a.json", '[{"text": "x", "label": "y"}]'),
        ("b.jsonl", '{"text": {"en": "x"}, "label": "y"}\n'),
    ],
)
def test_no_file_that_has_its_columns_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    column = "text.en" if name == "b.jsonl" else "text"
    look(run_config(str(tmp_path / name), column))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path, name: str) -> None:
    row = {"text": "x", "label": "y"}
    text = json.dumps(row) if name == "a.jsonl" else "text,label\nx,y\n"
    (tmp_path / name).write_text(text)
    with pytest.raises(CollaPipeError, match=r'data\.text-column "words" .* has text, label: name'):
        look(run_config(str(tmp_path / name), "words"))


def run_config(train: str, column: str) -> dict[str, Value]:
    values = declared_config(PROJECT)
    chosen: dict[str, Value] = {"data.train": train, "data.text-column": column}
    return {**values, "data.task": "classification", **chosen}
