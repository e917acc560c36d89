"""What is seen at once is refused at once: before any large library is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from collapipe_flwr.config.parsing import declared_config
from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.core.keys import Value
from collapipe_flwr.data.config import TASK_CLASSES, TASK_COLUMNS
from collapipe_flwr.federation.run.first_look import look
from tests.federation.wrong_inputs import ROWS

PROJECT = Path(__file__).parents[3]
LARGE = ("torch", "transformers", "datasets", "flwr", "grpc", "pandas", "numpy")
SCRIPT = f"""
import sys
from collapipe_flwr.cli import main
try:
    main()
finally:
    loaded = [name for name in {LARGE} if name in sys.modules]
    print("loaded", *loaded)
"""
TASK = ["-c", "data.task=classification"]
CHECK = ["check-config", str(PROJECT), *TASK, "-c"]
GENERATE = ["generate", "--text"]


@pytest.mark.parametrize(
    "arguments",
    [
        [*CHECK, "data.train=nope.csv"],
        [*CHECK, "data.train={}/good.csv", "-c", "data.label-column=mood"],
        [*CHECK, "data.train={}/good.csv", "-c", "data.max-source-length=1"],
        [*CHECK, "data.train={}/good.csv", "-c", "model.pretrained={}/nope"],
        [*CHECK, "data.train={}/good.csv", "-c", "data.tokenizer={}/nope"],
        [*CHECK, "data.trian={}/good.csv"],
        [*GENERATE, " ", "--run", "{}"],
        [*GENERATE, "a", "--run", "{}/nope"],
        [*GENERATE, "a", "--run", "{}", "--listen", "127.0.0.1:70000"],
    ],
)
def test_a_wrong_name_is_refused_before_large_libraries_are_loaded(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "good.csv").write_text(f"text,label\n{ROWS}")
    words = [word.replace("{}", str(tmp_path)) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert done.stdout.splitlines() == ["loaded"]
    assert "Traceback" not in done.stderr and done.stderr.count("Error: ") == 1


@pytest.mark.parametrize("task", sorted(TASK_COLUMNS))
def test_the_columns_of_a_task_are_those_that_it_reads(task: str) -> None:
    module, _, name = TASK_CLASSES[task].partition(":")
    kind = getattr(import_module(f"collapipe_flwr.data.{module}"), name)
    assert kind.columns == TASK_COLUMNS[task]
    assert TASK_CLASSES.keys() - TASK_COLUMNS.keys() == {"number-words"}  # it has its own data


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
