"""Instruct tuning equals TRL's SFTTrainer: labels, losses and weights of three steps.

TRL learns whole batches by the library's own loop; a chain learns them in micro-batches with
uneven numbers of answer tokens. SGD with rate 1 makes the first step's move the gradient.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from collapipe_flwr.config.schema import parse
from collapipe_flwr.data.batches import cut_batches
from collapipe_flwr.federation.run.learner import make_learner
from tests.chats import CHATML, MARKED, chat_tokenizer, conversations, message, write_lines
from tests.closeness import assert_near
from tests.rounds import SGD, Cut, largest_difference, train_split

trl = pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("small_matrices_are_fused"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
LLAMA = (
    "hidden_size=16 intermediate_size=24 num_hidden_layers=3 num_attention_heads=2 "
    "num_key_value_heads=1 max_position_embeddings=64"
)
ROWS, LIMIT = 12, 40  # the longest rows are cut


class Weights(TrainerCallback):
    """The weights after every step."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_step_end(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
        self.after.append({name: w.detach().clone() for name, w in model.state_dict().items()})


def train_by_trl(
    folder: Path, model: Any, tokenizer: Any, rows: list[dict[str, Any]]
) -> tuple[list[list[int]], list[float], list[dict[str, Tensor]]]:
    """Labels of the rows, losses and weights of three steps of four rows."""
    settings = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss="messages" in rows[0],
        max_length=LIMIT,
        per_device_train_batch_size=4,
        max_steps=3,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    weights = Weights()
    trainer = trl.SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[weights],
    )
    trainer.train()
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    return trainer.train_dataset["labels"][:], losses, weights.after


@pytest.mark.parametrize("marked", [False, True], ids=["completions", "every answer"])
def test_a_chain_learns_what_trl_learns(tmp_path: Path, marked: bool) -> None:
    tokenizer = chat_tokenizer(MARKED if marked else CHATML)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = conversations(ROWS)
    lost = [message("user", "it " * LIMIT), message("assistant", "was")]
    rows.insert(5, {"messages": lost})  # both drop it
    if not marked:  # TRL has no loss on every answer without marks
        rows = [{"messages": row["messages"][:2]} for row in rows]
    theirs = [{"prompt": r["messages"][:1], "completion": r["messages"][1:]} for r in rows]
    values = {
        "data.task": "instruct",
        "data.train": write_lines(tmp_path / "chats.jsonl", rows),
        "data.tokenizer": str(tmp_path / "tokenizer"),
        "data.max-source-length": LIMIT,
        "data.test-examples": 1,
        "model.type": "llama",
        "model.overrides": LLAMA,
    }
    learner = make_learner(parse(values))
    splitter = learner.splitter
    examples = learner.task.make_examples(learner.task.every_row).to_list()
    start = splitter.initial_weights(seed=1)
    model = AutoModelForCausalLM.from_config(splitter.config)
    model.load_state_dict(start)
    labels, wanted, after = train_by_trl(tmp_path, model, tokenizer, rows if marked else theirs)
    assert [example["labels"] for example in examples] == labels
    assert len(labels) == ROWS and max(map(len, labels)) == LIMIT
    cut = Cut(stops=(1, 3), micro_batches=(3, 1))
    for count in (1, 2, 3):
        steps = [
            [learner.task.collate(part) for part in (batch[:3], batch[3:])]
            for batch in cut_batches(examples[: 4 * count], 4)
        ]
        losses, found = train_split(splitter, start, cut, steps, SGD)
        assert_near(found, after[count - 1], depth=count)
    assert losses == pytest.approx(wanted, rel=1e-4)  # TRL logs four digits
    assert largest_difference(found, start) > 1e-2
