"""Odd and wrong inputs of the commands: one sentence with the key and the way out, or they serve.

Whatever is refused leaves no file behind.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from collapipe_flwr.cli import main
from collapipe_flwr.config.parsing import declared_config, read_overrides
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.errors import CollaPipeError
from collapipe_flwr.data.tasks import load_task
from collapipe_flwr.federation.run.first_look import look
from tests.federation.wrong_inputs import ROWS, TEXTS
from tests.reporting.made_up_runs import MadeUpRun

# datasets leaves it to the garbage collector to close a file that it could not read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PROJECT = str(Path(__file__).parents[2])
CHECK = ["check-config", PROJECT, "-c"]
DEVICE = ["device", "--listen", "127.0.0.1:0"]
MEMBER = '[[device]]\nname = "pi"\naddress = "127.0.0.1:50071"\n'
OK, RAN, WRONG = 0, 1, 2

# Arguments, the exit code, and the words that the sentence must have; good inputs have none.
DATA = [
    ("data.train=bom.csv", OK, ""),
    ("data.train=crlf.csv", OK, ""),
    ("data.train=blank-lines.jsonl", OK, ""),
    ("data.train=long.csv", OK, ""),
    ("data.train=mac.csv", OK, ""),
    ("data.train=nul.csv", OK, ""),
    ("data.train=table.json", WRONG, "data.train"),
    ("data.train=arrays.json", WRONG, "arrays.json lists"),
    ("data.train=number.json", WRONG, "data.train"),
    ("data.train=nested.jsonl", WRONG, "data.text-column"),
    ("data.train=null.jsonl", WRONG, "data.text-column"),
    ("data.train=binary.parquet", WRONG, "data.text-column"),
    ("data.train=empty.parquet", WRONG, "data.train no rows"),
    ("data.train=pipe.csv", WRONG, "data.train pipe.csv"),
    ("data.train=dangling.csv", WRONG, "data.train correct the path"),
    ("data.train=good.csv:train", WRONG, "data.train"),
    ("data.train=spaces.csv", WRONG, "data.label-column"),
    ("data.test=other.csv", WRONG, "other.csv words, mood"),
    ("data.train-examples=1", WRONG, "data.train-examples"),
    ("data.image-mean=a", WRONG, "data.image-mean must list numbers"),
    ("data.label-names=x,x", WRONG, "data.label-names"),
]
RUN = [
    ("", WRONG, "--run-config KEY=VALUE"),
    ("=5", WRONG, "--run-config KEY=VALUE"),
    ("train.learning-rate=nan", WRONG, "train.learning-rate finite nan"),
    ("train.learning-rate=1e999", WRONG, "train.learning-rate finite inf"),
    ("train.learning-rate=", WRONG, "train.learning-rate must be a number"),
    ("clusters=true", WRONG, "clusters must be a whole number"),
    ("scheduler.micro-batches=[]", WRONG, "scheduler.micro-batches must list"),
    ("nope.toml", WRONG, "nope.toml cannot be read"),
    ("tables.toml", WRONG, "train must be a table"),
    ("marked.toml", WRONG, "clusters must be at least 1"),
]
OTHERS = [
    (["check-config", "good.csv"], WRONG, "good.csv no Flower app"),
    (["check-config", "strange-app"], WRONG, "strange-app tool.flwr.app.config table"),
    (["check-config", PROJECT, "--resume", "torn-run"], WRONG, "torn-run/run-config.json new run"),
    (["check-config", PROJECT, "--federation-config", "empty"], WRONG, "--federation-config"),
    (["check-config", PROJECT, "--cluster", "binary.parquet"], WRONG, "binary.parquet UTF-8"),
    (["check-config", PROJECT, "--cluster", "endless.toml"], WRONG, "speed-gflop-per-s inf"),
    (["check-config", PROJECT, "--cluster", "negative.toml"], WRONG, "bandwidth-mhz -1"),
    (["check-config", PROJECT, "--cluster", "one-table.toml"], WRONG, "[[device]]"),
    (["report", "torn-run"], WRONG, "torn-run summary.json"),
    (["report", "label="], WRONG, "label="),
    (["report", "a=run", "a=run"], WRONG, "a"),
    (["report", "run", "-o", "empty"], WRONG, "--output empty"),
    (["compare", "garbled-run"], WRONG, "garbled-run"),
    (["watch", "good.csv"], WRONG, "good.csv"),
    (["watch", "run", "--host", "no.such.host.invalid"], WRONG, "--host no.such.host.invalid"),
    (["simulate", "--clusters", "0"], RAN, "clusters"),
    (["simulate", "--seeds", "5-1"], RAN, "seeds 5-1"),
    (["simulate", "--seeds", "0-99999999999"], RAN, "seeds 0-99999999999"),
    (["simulate", "--energy-budget", "-3x an equal share"], RAN, "energy-budget"),
    (["simulate", "--devices-from", "still.json"], RAN, "still.json"),
    (["simulate", "--clusters", "1000000"], RAN, "clusters 10000"),
    (["simulate", "--blocks", "100000"], RAN, "blocks 1000"),
    (["profile", ""], RAN, "MODEL config.json"),
    (["profile", "./empty"], RAN, "MODEL ./empty config.json"),
    (["profile", "./good.csv"], RAN, "MODEL ./good.csv is a file"),
    (["profile", "bert", "--micro-batch-sizes", "0"], RAN, "micro-batch-sizes"),
    (["profile", "bert", "--max-model-share", "nan"], RAN, "--max-model-share"),
    (["profile", "bert", "--json", "good.csv/x.json"], RAN, "--json"),
    ([*DEVICE, "--memory-mb", "inf"], RAN, "--memory-mb inf"),
    ([*DEVICE, "--cache-mb", "nan"], RAN, "--cache-mb nan"),
    ([*DEVICE, "--name", "a\nb"], RAN, "--name"),
    ([*DEVICE, "--radio-interface", "nosuch0"], RAN, "--radio-interface nosuch0"),
    ([*DEVICE, "--cache-dir", "good.csv"], RAN, "--cache-dir good.csv"),
    (["control-unit", "--socket", "x" * 200], RAN, "--socket"),
    (["generate", "--run", "torn-run", "--text", "a"], RAN, "--run torn-run"),
    (["bench", "nosuch"], WRONG, "nosuch"),
    (["report", "loop"], WRONG, "loop"),
    (["check-config", PROJECT, "--cluster", "pipe.toml"], WRONG, "pipe.toml name a file"),
]
COMMANDS = [*(([*CHECK, given], code, words) for given, code, words in RUN), *OTHERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("odd")
    _write_files(path)
    yield path
    gc.collect()


@pytest.fixture(autouse=True)
def _as_a_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a command changes in its process is as before when it has ended."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("collapipe_flwr.host.daemon.hide_unused_libraries", lambda: None)
    for module, served in (
        ("host.daemon", "_make_servicer"),
        ("federation.client.resident", "ControlUnit"),
    ):
        monkeypatch.setattr(f"collapipe_flwr.{module}.{served}", _accepted)
        monkeypatch.setattr(f"collapipe_flwr.{module}.configure_malloc", lambda: None)
    yield
    gc.enable()


def _accepted(*_: object, **__: object) -> None:
    raise SystemExit(OK)


@pytest.mark.parametrize(("given", "code", "sentence"), DATA, ids=[given for given, *_ in DATA])
def test_odd_data_is_read_or_refused_in_one_sentence(given: str, code: int, sentence: str) -> None:
    declared = declared_config(Path(PROJECT))
    values = {**declared, **TEXTS, **read_overrides([given], declared)}
    try:
        look(values)
        config = parse(values)
        task = load_task(config.seeded_data)
        for index in range(config.run.clusters):
            part = task.partition(index, config.run.clusters)
            task.collate(task.make_examples(part).select([0]).to_list())
        assert len(task.test) and task.labels
    except CollaPipeError as error:
        assert code == WRONG and all(word in str(error) for word in sentence.split()), error
        assert len(str(error).splitlines()) == 1
    else:
        assert code == OK


@pytest.mark.parametrize(
    ("words", "code", "sentence"), COMMANDS, ids=[" ".join(row[0][-2:])[:60] for row in COMMANDS]
)
def test_an_odd_argument_is_refused_in_one_sentence(
    words: list[str],
    code: int,
    sentence: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["collapipe", *words])
    with pytest.raises(SystemExit) as end:
        main()
    told = capfd.readouterr().err
    assert end.value.code == code, told
    assert all(word in told for word in sentence.split()), told
    assert "Traceback" not in told and told.count("Error: ") <= 1 and len(told) < 1200
    assert sorted(folder.rglob("*")) == before


def test_a_full_disk_behind_the_output_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "argv", ["collapipe", "--version"])
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err == "Error: No space left on device; make room\n"


def test_a_file_that_may_not_be_looked_at_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "secret/rows.csv")

    monkeypatch.setattr(sys, "argv", ["collapipe", "report", "run"])
    monkeypatch.setattr(Path, "resolve", refuse)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("Error: secret/rows.csv: Permission denied; change")


@pytest.mark.parametrize("given", [None, io.StringIO(), io.TextIOWrapper(io.BytesIO(b"\xff\n"))])
def test_a_token_that_does_not_come_is_one_sentence(
    given: io.TextIOBase | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["collapipe", "join", "-"])
    monkeypatch.setattr(sys, "stdin", given)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == RAN and "not a join token" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "meant"), [("rnu", "run"), ("clsuter", "cluster")])
def test_a_misspelt_command_gets_one_suggestion(
    word: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["collapipe", word])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == WRONG and capsys.readouterr().err.count(f"'{meant}'") == 1


def test_ctrl_c_while_the_program_loads_is_one_line() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
class Impatient:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Impatient())
from collapipe_flwr.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip(), done.stdout) == (130, "interrupted", "")


def _write_files(folder: Path) -> None:
    good = f"text,label\n{ROWS}"
    texts = {
        "good.csv": good,
        "bom.csv": f"\ufeff{good}",
        "blank-lines.jsonl": '{"text": "x", "label": "a"}\n\n{"text": "y", "label": "b"}\n' * 20,
        "long.csv": f"{good}{'very ' * 200_000}long,a\n",
        "nul.csv": f"{good}te\0xt,a\n",
        "table.json": good,
        "arrays.json": "[[1, 2], [3, 4]]",
        "number.json": "42",
        "nested.jsonl": '{"text": {"a": 1}, "label": "a"}\n{"text": {"a": 2}, "label": "b"}\n' * 20,
        "null.jsonl": '{"text": null, "label": "a"}\n{"text": "y", "label": "b"}\n' * 20,
        "spaces.csv": f"text, label\n{ROWS}",
        "other.csv": "words,mood\nhello,a\n",
        "marked.toml": "\ufeffclusters = 0\n",
        "tables.toml": "[[train]]\nlearning-rate = 1.0\n",
        "endless.toml": f'id = "c"\n{MEMBER}speed-gflop-per-s = inf\n',
        "negative.toml": f'id = "c"\n[links]\nbandwidth-mhz = -1.0\n{MEMBER}',
        "one-table.toml": 'id = "c"\n[device]\nname = "pi"\naddress = "127.0.0.1:1"\n',
        "still.json": json.dumps({"clusters": [["slow"]], "kinds": {"slow": {"speed": 0}}}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "crlf.csv").write_bytes(good.replace("\n", "\r\n").encode())
    (folder / "mac.csv").write_bytes(good.replace("\n", "\r").encode())
    labels = ["a", "b"] * 20
    pq.write_table(
        pa.table({"text": [b"\xff\xfe"] * 40, "label": labels}), folder / "binary.parquet"
    )
    schema = pa.schema({"text": pa.string(), "label": pa.string()})
    pq.write_table(schema.empty_table(), folder / "empty.parquet")
    for name in ("pipe.csv", "pipe.toml"):
        os.mkfifo(folder / name)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling.csv").symlink_to(folder / "nowhere.csv")
    for name in ("empty", "strange-app", "torn-run"):
        (folder / name).mkdir()
    (folder / "strange-app" / "pyproject.toml").write_text('tool = "none"\n')
    for name in ("summary.json", "run-config.json", "rounds.jsonl", "events.jsonl"):
        (folder / "torn-run" / name).write_bytes(b"\xff\0nonsense")
    for name in ("run", "garbled-run"):
        made = MadeUpRun(folder / name)
        made.end_round()
        made.save("completed")
        made.die()
    for file in (folder / "garbled-run").glob("*.json*"):
        if file.name != "summary.json":
            file.write_text('{"round":\n' * 3)
