"""Text in, text out: the same as the library's own pipeline on the saved model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

from collapipe_flwr.cli import app
from collapipe_flwr.core.errors import ConfigError, LinkError, ModelError
from collapipe_flwr.generation.text_generator import text_generator
from collapipe_flwr.generation.text_model import TextModel
from collapipe_flwr.transport.generation import GenerateRequest, TextClient, TextServer
from tests.cluster.hosted import daemons
from tests.generation.conftest import TEXTS, save

NEW = 9


@pytest.fixture(params=["translator", "storyteller"])
def run_dir(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def unsplit(run_dir: Path, text: str) -> str:
    """What the library writes by itself."""
    tokenizer: Any = AutoTokenizer.from_pretrained(run_dir / "model")
    ids = tokenizer(text)["input_ids"]
    kind: Any = AutoModelForSeq2SeqLM
    if "gpt2" in (run_dir / "model" / "config.json").read_text():
        kind, ids = AutoModelForCausalLM, ids[:-1]  # the text goes on
    model: Any = kind.from_pretrained(run_dir / "model")
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False
    )
    shown = len(ids) if kind is AutoModelForCausalLM else 1
    decoded: str = tokenizer.decode(output[0, shown:], skip_special_tokens=True)
    return decoded


def test_threads_write_what_the_library_writes(run_dir: Path) -> None:
    expected = [unsplit(run_dir, text) for text in TEXTS]
    assert len(set(expected)) > 1
    with text_generator(TextModel.load(run_dir), devices=3, slots=2) as writer:
        requests = [GenerateRequest(text=text, max_new_tokens=NEW) for text in TEXTS]
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda request: "".join(writer.write(request)), requests))
        assert found == expected


def test_daemons_write_what_the_library_writes(run_dir: Path) -> None:
    model = TextModel.load(run_dir)
    with (
        daemons(2) as (cluster, edge),
        text_generator(model, cluster, edge_address=edge, slots=2) as writer,
    ):
        found = "".join(writer.write(GenerateRequest(text=TEXTS[0], max_new_tokens=NEW)))
    assert found == unsplit(run_dir, TEXTS[0])


def test_a_server_streams_to_several_clients(storyteller: Path) -> None:
    expected = [unsplit(storyteller, text) for text in TEXTS]
    with (
        text_generator(TextModel.load(storyteller), devices=2, slots=2) as writer,
        TextServer("127.0.0.1:0", writer.write, most=2) as server,
        TextClient(server.address) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        requests = [GenerateRequest(text=text, max_new_tokens=NEW) for text in TEXTS]
        pieces = list(pool.map(lambda request: list(client.write(request)), requests))
        assert ["".join(p) for p in pieces] == expected
        assert max(map(len, pieces)) > 1  # not all at the end
        left = client.write(requests[0])
        next(left)
        left.close()  # type: ignore[attr-defined]
        assert "".join(client.write(requests[1])) == expected[1]
        with pytest.raises(ConfigError, match="--text is empty"):
            list(client.write(GenerateRequest(text=" ")))


def test_nobody_at_the_address() -> None:
    with (
        TextClient("127.0.0.1:1", deadline_s=5.0) as client,
        pytest.raises(LinkError, match=r"cannot be reached.*; start it there by"),
    ):
        list(client.write(GenerateRequest(text="hello")))


@pytest.mark.parametrize(
    "setting",
    [{"use_cache": False}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}],
)
def test_settings_of_speed_do_not_change_the_text(
    setting: dict[str, Any], storyteller: Path, tmp_path: Path
) -> None:
    expected = unsplit(storyteller, TEXTS[0])
    with text_generator(_with(setting, storyteller, tmp_path), devices=2, slots=1) as writer:
        assert "".join(writer.write(GenerateRequest(text=TEXTS[0], max_new_tokens=NEW))) == expected


def test_generation_that_needs_further_passes_is_refused(storyteller: Path, tmp_path: Path) -> None:
    model = _with({"guidance_scale": 1.5}, storyteller, tmp_path)
    with (
        text_generator(model, devices=2, slots=1) as writer,
        pytest.raises(ModelError, match="guidance_scale runs the model in ways"),
    ):
        list(writer.write(GenerateRequest(text=TEXTS[0], max_new_tokens=NEW)))


def _with(setting: dict[str, Any], run_dir: Path, folder: Path) -> TextModel:
    """The same model with one more line in its generation settings."""
    shutil.copytree(run_dir, folder, dirs_exist_ok=True)
    file = folder / "model" / "generation_config.json"
    own = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**own, **setting}))
    return TextModel.load(folder)


def test_a_type_that_only_trains_says_so_before_anything_starts(tmp_path: Path) -> None:
    overrides = {"hidden_size": 32, "n_layer": 2, "n_head": 2}
    with pytest.raises(ModelError, match="'bloom', which cannot generate token by token"):
        TextModel.load(save(tmp_path, "causal-lm", "bloom", overrides))


def test_a_text_beyond_the_positions(storyteller: Path) -> None:
    with (
        text_generator(TextModel.load(storyteller), devices=1, slots=1) as writer,
        pytest.raises(ModelError, match="64 positions: shorten the text"),
    ):
        list(writer.write(GenerateRequest(text=TEXTS[0], max_new_tokens=64)))


def test_a_text_ends_behind_a_stop_string(storyteller: Path) -> None:
    """As the library has it: with the whole token that completes the string."""
    tokenizer: Any = AutoTokenizer.from_pretrained(storyteller / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(storyteller / "model")
    whole = unsplit(storyteller, TEXTS[0])
    stop = whole[3:5]
    prompt = torch.tensor([tokenizer(TEXTS[0])["input_ids"][:-1]])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        do_sample=False,
        stop_strings=[stop],
        tokenizer=tokenizer,
    )
    expected = tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
    assert stop in expected and expected != whole
    request = GenerateRequest(text=TEXTS[0], max_new_tokens=NEW, stop=("nowhere", stop))
    with text_generator(TextModel.load(storyteller), devices=2, slots=1) as writer:
        assert "".join(writer.write(request)) == expected
        with pytest.raises(ConfigError, match="--stop needs --num-beams 1"):
            list(writer.write(replace(request, num_beams=2)))
        assert "".join(writer.write(replace(request, stop=()))) == whole


def test_chance_repeats_itself_with_a_seed_only(storyteller: Path) -> None:
    request = GenerateRequest(text=TEXTS[0], max_new_tokens=NEW, temperature=3.0, seed=4)
    with text_generator(TextModel.load(storyteller), devices=2, slots=2) as writer:
        assert "".join(writer.write(request)) == "".join(writer.write(request))
        texts = {"".join(writer.write(replace(request, seed=None))) for _ in range(4)}
        assert len(texts) > 1
        greedy = "".join(writer.write(replace(request, sample=False)))
    assert greedy == unsplit(storyteller, TEXTS[0])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seed": -1}, {"top_p": 2.0}, {"temperature": float("nan")}, {"stop": ("",)}),
        *({"text": "a\ud800"}, {"stop": ("\ud800",)}, {"stop": ("a",) * 1000}),
        *({"num_beams": 10**7}, {"max_new_tokens": 10**12}),
    ],
)
def test_a_wish_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        GenerateRequest(**{"text": "hello", **wrong})


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no model"):
        TextModel.load(tmp_path)


@pytest.fixture
def command() -> Iterator[CliRunner]:
    yield CliRunner()


@pytest.mark.parametrize("options", [[], ["--stream"], ["--devices", "1", "--slots", "1"]])
def test_the_command_prints_a_line_per_text(
    command: CliRunner, storyteller: Path, options: list[str]
) -> None:
    texts = [word for text in TEXTS[:2] for word in ("--text", text)]
    new = ["--max-new-tokens", str(NEW)]
    result = command.invoke(app, ["generate", "--run", str(storyteller), *texts, *new, *options])
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(unsplit(storyteller, text) + "\n" for text in TEXTS[:2])
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--text is missing"),
        (["--text", "hello"], "--run is missing"),
        (["--text", "hello", "--run", "/nowhere"], "no such folder"),
        (["--text", " ", "--run", "/nowhere"], "--text is empty"),
        (["--text", "a", "--run", "/nowhere", "--listen", "127.0.0.1:70000"], "--listen: must"),
        (["--text", "a", "--run", "/nowhere", "--edge", "here"], "--edge: must read like"),
        (["--text", "a", "--at", "here"], "--at: must read like"),
        (["--text", "a", "--run", "/x", "--stop", "b", "--num-beams", "2"], "--num-beams 1"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    command: CliRunner, arguments: list[str], sentence: str
) -> None:
    result = command.invoke(app, ["generate", *arguments])
    assert result.exit_code == 1
    assert sentence in str(result.exception)


def test_a_folder_that_is_missing_or_holds_runs(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such folder"):
        TextModel.load(tmp_path / "rnu")
    (tmp_path / "20260101-120000" / "model").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"folder of runs: name one, such as .*20260101-120000"):
        TextModel.load(tmp_path)
