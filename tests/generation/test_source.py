"""The model of a name: a folder first, the hub only for what can be a name there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from collapipe_flwr.core import hub
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.generation.source import find_model


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """The questions to a hub that does not answer."""
    found: list[object] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "LIMIT_S", 0.1)
    monkeypatch.setattr(hub, "_ask", lambda *question: found.append(question))
    hub.is_reachable.cache_clear()
    yield found
    hub.is_reachable.cache_clear()


def model(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [kind]}))
    return folder


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "~/nowhere", "a/b/c", "here/nowhere"])
def test_a_path_is_never_looked_up(name: str, asked: list[object]) -> None:
    Path("here").mkdir()
    with pytest.raises(ModelError, match=r"there is no such folder .*: correct the path"):
        find_model(name)
    assert not asked


def test_a_name_is_looked_up_once_and_found_where_it_was_downloaded(
    tmp_path: Path, asked: list[object]
) -> None:
    for _ in range(2):
        with pytest.raises(ModelError, match=r"'nowhere': .* the hub cannot be reached"):
            find_model("nowhere")
    assert len(asked) == 1
    stored = tmp_path / "cache" / "models--owner--model"
    model(stored / "snapshots" / "abc", "GPT2LMHeadModel")
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("abc")
    assert find_model("owner/model") == "owner/model"


@pytest.mark.parametrize(
    "kind", ["BertForSequenceClassification", "GPT2ForTokenClassification", "BertForMaskedLM"]
)
def test_a_model_that_writes_no_text_is_named(tmp_path: Path, kind: str) -> None:
    model(tmp_path / "run" / "model", kind)
    with pytest.raises(ModelError, match=f"holds a {kind}, which writes no text: name"):
        find_model(str(tmp_path / "run"))


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BartForConditionalGeneration"])
def test_a_run_stands_for_its_model(tmp_path: Path, kind: str) -> None:
    folder = model(tmp_path / "run" / "model", kind)
    assert find_model(str(tmp_path / "run")) == find_model(str(folder)) == str(folder)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_description_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"holds no model: .*config\.json is missing or damaged"):
        find_model(str(tmp_path))
