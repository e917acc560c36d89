"""Model, data, training and test of a sentiment classifier."""

import random
from itertools import product

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

BATCH_SIZE = 32
MAX_LENGTH = 16
TEST_SHARE = 0.2

SUBJECTS = ("the film", "this book", "her second album", "the last season of the show")
VERBS = ("was", "is", "seemed", "turned out")
ADVERBS = ("truly", "very", "rather", "in my opinion")
GOOD = ("good", "moving", "clever", "funny", "worth the time")
BAD = ("dull", "bad", "boring", "far too long", "a waste of money")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def get_reviews() -> list[tuple[str, int]]:
    """Reviews of one sentence in a fixed random order, with 1 for praise and 0 for the rest."""
    reviews = [
        (" ".join(words), int(words[-1] in GOOD))
        for words in product(SUBJECTS, VERBS, ADVERBS, GOOD + BAD)
    ]
    random.Random(0).shuffle(reviews)
    return reviews


def get_tokenizer(model_name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model on the hub, or one that knows the words of the reviews."""
    if model_name:
        return AutoTokenizer.from_pretrained(model_name, model_max_length=MAX_LENGTH)
    words = sorted({word for text, _ in get_reviews() for word in text.split()})
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_LENGTH,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def get_model(model_name: str) -> nn.Module:
    """A model on the hub, or a small one with random weights."""
    if model_name:
        return AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=2)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(get_tokenizer(model_name)),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def load_data(
    partition_id: int, num_partitions: int, model_name: str
) -> tuple[DataLoader, DataLoader]:
    """The loaders of one partition for training and test."""
    tokenizer = get_tokenizer(model_name)
    examples = [
        {**tokenizer(text, truncation=True), "labels": label}
        for text, label in get_reviews()[partition_id::num_partitions]
    ]
    tests = int(TEST_SHARE * len(examples))
    collate = DataCollatorWithPadding(tokenizer)
    trainloader = DataLoader(examples[tests:], batch_size=BATCH_SIZE, collate_fn=collate)
    testloader = DataLoader(examples[:tests], batch_size=BATCH_SIZE, collate_fn=collate)
    return trainloader, testloader


def train(model: nn.Module, trainloader: DataLoader, epochs: int, lr: float) -> float:
    """Train in place; returns the mean loss over all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)
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
def test(model: nn.Module, testloader: DataLoader) -> tuple[float, float]:
    """Mean loss and accuracy over the examples."""
    model.eval()
    total = 0.0
    logits, labels = [], []
    for batch in testloader:
        outputs = model(**batch)
        total += outputs.loss.item() * len(batch["labels"])
        logits.append(outputs.logits)
        labels.append(batch["labels"])
    return total / len(testloader.dataset), accuracy(torch.cat(logits), torch.cat(labels))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The share of examples whose highest score is that of their label."""
    return (logits.argmax(dim=-1) == labels).float().mean().item()
