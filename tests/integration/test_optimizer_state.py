"""With `train.optimizer-state=keep` one cluster is one optimiser over all rounds, however cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from flwr.app import Context, Message
from safetensors.torch import load_file

from client_app.app import app as client_app
from collapipe_flwr.config.schema import parse
from collapipe_flwr.core.keys import Value
from collapipe_flwr.federation.arrays import decode_tensors, encode_tensors
from collapipe_flwr.federation.local_grid import LocalGrid
from collapipe_flwr.federation.records import ARRAYS
from server_app.app import run
from tests.integration.conftest import TINY, RunApp, events_of
from tests.power_cuts import Killed
from tests.rounds import largest_difference

ALONE: dict[str, Value] = {
    "clusters": 1,
    "num-server-rounds": 3,
    "train.decay": "none",
    "scheduler.policy": "random",
    "scheduler.micro-batch-sizes": "4",
    "scheduler.micro-batches": "2",
    "evaluation.every": 3,
}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.parametrize(
    "rule",
    [
        {"train.optimizer": "NAdam", "train.optimizer-arguments": "betas=[0.8,0.99]"},
        pytest.param({"train.optimizer": "adamw"}, marks=pytest.mark.slow),
    ],
    ids=lambda rule: rule["train.optimizer"],
)
def test_one_cluster_that_keeps_its_state_is_an_unsplit_model_with_one_optimiser(
    run_app: RunApp, rule: dict[str, Value]
) -> None:
    keep: dict[str, Value] = {**ALONE, **rule, "train.optimizer-state": "keep"}
    split = run_app({**keep, "run-name": "split"})
    events = events_of(split)
    cuts = {json.dumps(event["plan"]["clusters"][0]["segments"]) for event in events}
    assert len(cuts) > 1  # segments changed their owners
    whole = run_app({**keep, "runtime": "whole", "run-name": "whole"})
    reset = run_app({**ALONE, **rule, "run-name": "reset"})
    apart = largest_difference(weights_of(split), weights_of(whole))
    assert apart < 1e-4
    assert largest_difference(weights_of(split), weights_of(reset)) > 20 * apart


def _started_again(values: dict[str, Value], *, dies_in: int | None = None) -> None:
    """A run whose every message finds a new SuperNode, and whose server may die in a round."""
    place = {"partition-id": 0, "num-partitions": 1}
    trained = [0]

    class Renewed(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            self.add(1, client_app)
            replies = super().send_and_receive(messages, timeout=timeout)
            trained[0] += any(r.metadata.message_type == "train" for r in replies)
            if trained[0] == dies_in:
                raise Killed  # the cluster has finished a round that no checkpoint knows of
            return replies

    run(Renewed({1: client_app}, node_configs={1: place}, run_config=values), parse(values))


@pytest.mark.parametrize(
    ("runtime", "optimizer"),
    [
        ("pipeline", "adamw"),
        ("whole", "adamw"),
        pytest.param("pipeline", "Adafactor", marks=pytest.mark.slow),
    ],
)
def test_with_a_state_dir_neither_a_new_node_nor_a_resume_changes_a_bit(
    tmp_path: Path, caplog, runtime: str, optimizer: str
) -> None:
    keep: dict[str, Value] = {
        **TINY,
        **ALONE,
        "runtime": runtime,
        "train.optimizer": optimizer,
        "train.optimizer-state": "keep",
        "output-dir": str(tmp_path),
    }
    places = {1: {"partition-id": 0, "num-partitions": 1}}
    undisturbed = {**keep, "run-name": "undisturbed"}
    grid = LocalGrid({1: client_app}, node_configs=places, run_config=undisturbed)
    run(grid, parse(undisturbed))
    kept: dict[str, Value] = {**keep, "train.state-dir": str(tmp_path / "state"), "run-name": "cut"}
    with pytest.raises(Killed):
        _started_again(kept, dies_in=2)
    _started_again({**kept, "resume": str(tmp_path / "cut")})
    assert not [r for r in caplog.records if "no optimiser state" in r.message]
    model = "model/model.safetensors"
    whole, cut = (tmp_path / name / model for name in ("undisturbed", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert len(files) == 3 and {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_a_node_without_its_past_says_so_and_starts_anew(tmp_path: Path, caplog) -> None:
    values = {**TINY, **ALONE, "train.optimizer-state": "keep", "output-dir": str(tmp_path)}
    place = {"partition-id": 0, "num-partitions": 1}

    class Forgetful(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            self.add(1, client_app)  # a new SuperNode each time
            return super().send_and_receive(messages, timeout=timeout)

    run(Forgetful({1: client_app}, node_configs={1: place}, run_config=values), parse(values))
    told = [r for r in caplog.records if "no optimiser state of an earlier round" in r.message]
    assert len(told) == ALONE["num-server-rounds"] - 1


class Unlucky(LocalGrid):
    """In its second training round node 2 fails at once, diverges, or is late with its reply."""

    fate = ""
    trained = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.trained += bool(messages) and messages[0].metadata.message_type == "train"
        replies = super().send_and_receive(messages, timeout=timeout)
        late = self.fate == "late" and self.trained == 2
        return [r for r in replies if not (late and r.metadata.src_node_id == 2)]

    def answer(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "train" and self.trained == 2:
            if self.fate == "fails":
                raise RuntimeError("no memory left")
            if self.fate == "diverges":
                sent = decode_tensors(message.content[ARRAYS])
                bad = {k: t * torch.nan if t.is_floating_point() else t for k, t in sent.items()}
                message.content[ARRAYS] = encode_tensors(bad)
        return client_app(message, context)


def _outcome(values: dict[str, Value], fate: str) -> tuple[bytes, list[int]]:
    """The model, and how many clusters each round lost."""
    values = {**values, "run-name": fate}
    places = {node: {"partition-id": node - 1, "num-partitions": 2} for node in (1, 2)}
    grid = Unlucky({1: client_app}, node_configs=places, run_config=values)
    grid.add(2, grid.answer)
    grid.fate = fate
    run(grid, parse(values))
    folder = Path(str(values["output-dir"])) / fate
    events = events_of(folder)
    model = (folder / "model" / "model.safetensors").read_bytes()
    return model, [len(event["lost"]) for event in events]


@pytest.mark.parametrize(
    ("runtime", "fates"),
    [("pipeline", {"diverges": "", "late": "state"}), ("whole", {"late": "state"})],
    ids=["pipeline", "whole"],
)
def test_a_round_that_is_not_accepted_leaves_no_trace(
    tmp_path: Path, runtime: str, fates: dict[str, str]
) -> None:
    """The cluster goes on as if it had failed before it trained anything."""
    values: dict[str, Value] = {
        **TINY,
        **ALONE,
        "clusters": 2,
        "runtime": runtime,
        "train.optimizer-state": "keep",
        "output-dir": str(tmp_path),
    }
    never, lost = _outcome(values, "fails")
    assert lost == [0, 1, 0]
    for fate, state_dir in fates.items():
        kept = str(tmp_path / state_dir) if state_dir else ""
        assert _outcome({**values, "train.state-dir": kept}, fate) == (never, lost), fate
