"""Tiny whole-model clients and a wire that serialises like Flower's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from transformers import LlamaConfig, LlamaForCausalLM

from tests.skeletons import models_are_profiled_once, skeletons_are_copied  # noqa: F401

Answer = Callable[[Message, Context], Message]


def drift(scale: float, examples: int = 10) -> Answer:
    """A client that adds a fixed, key-dependent step to every floating array it is sent."""

    def train(message: Message, context: Context) -> Message:
        del context
        arrays = next(iter(message.content.array_records.values()))
        moved = ArrayRecord()
        for index, (key, array) in enumerate(arrays.items()):
            values = array.numpy()
            if values.dtype.kind == "f":
                rng = np.random.default_rng(index)
                values = values + values.dtype.type(scale) * rng.normal(size=values.shape)
                moved[key] = Array(np.asarray(values.astype(array.dtype)))
            else:
                moved[key] = Array(np.asarray(values + values.dtype.type(1)))
        metrics = MetricRecord({"loss": 1.0 / examples, "num-examples": examples})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    return train


@pytest.fixture
def floats() -> ArrayRecord:
    """A small model of float32 arrays."""
    generator = torch.Generator().manual_seed(3)
    return ArrayRecord(
        {
            "layer.weight": torch.randn(4, 3, generator=generator),
            "layer.bias": torch.randn(4, generator=generator),
            "head.weight": torch.randn(2, 4, generator=generator),
        }
    )


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a checkpoint that PeftModels are made of."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def over_the_wire(content: RecordDict) -> RecordDict:
    """Serialise and rebuild, as between machines."""
    objects = get_all_nested_objects(content)
    contents = {object_id: obj.deflate() for object_id, obj in objects.items()}
    rebuilt = inflate_object_from_contents(content.object_id, contents)
    assert isinstance(rebuilt, RecordDict)
    return rebuilt


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a task of Flower's, which its messages ask for."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def drifting() -> Callable[..., Answer]:
    return drift


@pytest.fixture
def wire() -> Callable[[RecordDict], RecordDict]:
    return over_the_wire
