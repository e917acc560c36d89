"""Model, data, training and test of instruction tuning."""

import math
import random
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

BATCH_SIZE = 8
MAX_LENGTH = 24
TEST_SHARE = 0.2
IGNORED = -100  # a label that the loss does not read
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PROMPT = "### Instruction : {} ### Response :"


def get_dialogs() -> list[tuple[str, str]]:
    """Instructions and answers in a fixed random order."""
    dialogs = []
    for first, name in enumerate(NUMBERS):
        dialogs.append((f"write the word {name} twice", f"{name} {name}"))
        dialogs += [
            (f"add {name} and {NUMBERS[second]}", NUMBERS[(first + second) % 10])
            for second in range(0, 10, 2)
        ]
    random.Random(0).shuffle(dialogs)
    return dialogs


def get_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model on the hub, or one that knows the words of the dialogs."""
    if model_name:
        return AutoTokenizer.from_pretrained(model_name)
    words = {word for dialog in get_dialogs() for text in dialog for word in text.split()}
    known = ("<pad>", "</s>", "#", "###", ":", "Instruction", "Response", *sorted(words))
    vocabulary = {word: number for number, word in enumerate(known)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<pad>"
    )


def get_model(model_name: str) -> PeftModel:
    """The base of a model on the hub, or a small random one, with new adapters."""
    base = AutoModelForCausalLM.from_pretrained(model_name or make_base(), dtype=torch.float32)
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))


def make_base() -> str:
    """The folder of the small random model, saved by the process that needs it first."""
    folder = Path(tempfile.gettempdir()) / "flowertune-example-base"
    if not folder.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(get_tokenizer("")),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
        )
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            LlamaForCausalLM(config).save_pretrained(Path(draft) / "base")
            (Path(draft) / "base").rename(folder)
    return str(folder)


def load_data(
    partition_id: int, num_partitions: int, model_name: str
) -> tuple[DataLoader, DataLoader]:
    """The loaders of one partition for training and test."""
    tokenizer = get_tokenizer(model_name)
    examples = [
        tokenize(tokenizer, *dialog) for dialog in get_dialogs()[partition_id::num_partitions]
    ]
    tests = int(TEST_SHARE * len(examples))

    def collate(rows: list[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        return collate_completions(rows, tokenizer.pad_token_id)

    trainloader = DataLoader(examples[tests:], batch_size=BATCH_SIZE, collate_fn=collate)
    testloader = DataLoader(examples[:tests], batch_size=BATCH_SIZE, collate_fn=collate)
    return trainloader, testloader


def tokenize(
    tokenizer: PreTrainedTokenizerBase, instruction: str, answer: str
) -> tuple[list[int], list[int]]:
    """The tokens of a dialog, and its labels: the loss is on the answer alone."""
    asked = tokenizer(PROMPT.format(instruction))["input_ids"]
    told = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    ids = (asked + told)[:MAX_LENGTH]
    return ids, ([IGNORED] * len(asked) + told)[:MAX_LENGTH]


def collate_completions(rows: list[tuple[list[int], list[int]]], padding: int) -> dict[str, Tensor]:
    """A batch, padded at the end, as trl's collator for completions makes it."""
    longest = max(len(ids) for ids, _ in rows)

    def padded(values: list[int], filling: int) -> list[int]:
        return values + [filling] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(ids, padding) for ids, _ in rows]),
        "attention_mask": torch.tensor([padded([1] * len(ids), 0) for ids, _ in rows]),
        "labels": torch.tensor([padded(labels, IGNORED) for _, labels in rows]),
    }


def cosine_annealing(server_round: int, rounds: int, highest: float, lowest: float) -> float:
    """The learning rate of a round."""
    return lowest + 0.5 * (highest - lowest) * (1 + math.cos(math.pi * server_round / rounds))


def train(model: PeftModel, trainloader: DataLoader, epochs: int, lr: float) -> float:
    """Train the adapters in place; returns the mean loss over all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-4)
    model.train()
    losses = []
    for _ in range(epochs):
        for batch in trainloader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(model: PeftModel, testloader: DataLoader) -> float:
    """Mean loss over all tokens of the answers."""
    model.eval()
    total, counted = 0.0, 0
    for batch in testloader:
        tokens = int((batch["labels"][:, 1:] != IGNORED).sum())
        total += model(**batch).loss.item() * tokens
        counted += tokens
    return total / counted
