"""Law: a table lent row by row trains as one table in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD
from transformers import BertForMaskedLM

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.describing import describe_live
from collapipe_flwr.models.parts import EdgePart, EmbeddingPart
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from tests.closeness import assert_near
from tests.models.own_models import bert_config

TIED = [
    ("bert", "masked-lm"),
    ("roberta", "masked-lm"),
    ("distilbert", "masked-lm"),
    ("gpt2", "causal-lm"),
    ("gemma", "causal-lm"),
    ("bart", "seq2seq"),
    ("m2m_100", "seq2seq"),
    ("t5", "seq2seq"),
]


def joined(*parts: Any) -> dict[str, torch.Tensor]:
    return {key: value for part in parts for key, value in part.state_dict().items()}


def _borrow(embedding: EmbeddingPart, edge: EdgePart, batch: dict[str, torch.Tensor]) -> None:
    for key, ids in embedding.rows_needed(batch).items():
        embedding.load_rows(key, ids, edge.rows(key, ids))


def _give_back(embedding: EmbeddingPart, edge: EdgePart, batch: dict[str, torch.Tensor]) -> None:
    for key, ids in embedding.rows_needed(batch).items():
        edge.add_row_gradients(key, ids, embedding.row_gradients(key))


@pytest.mark.parametrize(("model_type", "task"), TIED)
def test_three_steps_equal_the_tied_model(model_type: str, task: str, tiny: Any) -> None:
    splitter = Splitter(tiny.spec(model_type, task, ties="rows"))
    assert len(splitter.ties) == 1
    weights = splitter.initial_weights(seed=3)
    batch = tiny.batch(model_type, task)
    context = splitter.context(batch)
    whole = splitter.build_whole(weights).train()
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    segment = splitter.build_segment(0, splitter.num_blocks, weights)
    parameters = [p for part in (embedding, segment, edge) for p in part.parameters()]
    whole_steps, split_steps = SGD(whole.parameters(), lr=0.1), SGD(parameters, lr=0.1)
    options = {} if task == "masked-lm" else {"use_cache": False}
    for _ in range(3):
        whole_steps.zero_grad()
        expected = whole(**batch, **options).loss
        expected.backward()
        whole_steps.step()
        split_steps.zero_grad()
        _borrow(embedding, edge, batch)
        loss = edge(segment(embedding(batch), context), context)
        loss.backward()
        _give_back(embedding, edge, batch)
        split_steps.step()
        assert_near(loss, expected)
    trained, found = whole.state_dict(), joined(embedding, segment, edge)
    assert_near(found, {key: trained[key] for key in found})


def test_the_control_unit_holds_no_table(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bart", "seq2seq", ties="rows"))
    (key,) = splitter.ties
    assert key in splitter.edge_keys()
    assert not any("embed_tokens" in name for name in splitter.embedding_keys())
    weights = splitter.initial_weights(seed=3)
    embedding = splitter.build_embedding(
        {name: weights[name] for name in splitter.embedding_keys()}
    )
    assert sum(p.numel() for p in embedding.parameters()) < weights[key].numel()


def test_padding_stays_without_gradient(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bart", "seq2seq", ties="rows"))
    weights = splitter.initial_weights(seed=3)
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    batch = tiny.batch("bart", "seq2seq")
    _borrow(embedding, edge, batch)
    embedding(batch).sum().backward()
    ((key, ids),) = embedding.rows_needed(batch).items()
    gradients = embedding.row_gradients(key)
    assert not gradients[ids == 0].any()
    assert gradients[ids != 0].any()


def test_stale_or_missing_rows_are_an_error(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("gpt2", "causal-lm", ties="rows"))
    weights = splitter.initial_weights(seed=3)
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    with pytest.raises(ModelError, match="load the rows"):
        embedding({"input_ids": torch.tensor([[5]])})
    _borrow(embedding, edge, {"input_ids": torch.tensor([[5, 9]])})
    embedding({"input_ids": torch.tensor([[9, 5]])})
    for unknown in (7, 30):
        with pytest.raises(ModelError, match="not loaded"):
            embedding({"input_ids": torch.tensor([[5, unknown]])})


def test_untied_tables_start_equal_and_part_ways(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("bart", "seq2seq", ties="untie"))
    assert not splitter.ties
    weights = splitter.initial_weights(seed=3)
    own, shared = weights["model.encoder.embed_tokens.weight"], weights["model.shared.weight"]
    assert torch.equal(own, shared)
    weights["model.encoder.embed_tokens.weight"] = own + 1.0
    whole = splitter.build_whole(weights)
    assert torch.equal(whole.model.encoder.embed_tokens.weight, own + 1.0)
    assert torch.equal(whole.model.decoder.embed_tokens.weight, shared)


def test_a_frozen_table_stays_frozen_at_both_ends_when_it_is_untied() -> None:
    model = BertForMaskedLM(bert_config())
    model.bert.embeddings.word_embeddings.requires_grad_(False)
    splitter = Splitter(describe_live(model, ties="untie"))
    both = {"bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}
    assert both <= set(splitter.all_keys()) & splitter.constant_keys


def test_a_borrowed_table_costs_the_control_unit_nothing(tiny: Any) -> None:
    splitter = Splitter(tiny.spec("gemma", "causal-lm", ties="rows"))
    profile = profile_model(splitter, BatchShape(source_length=8))
    assert profile.embedding.parameter_bytes == 0


def test_token_types_are_rows_of_a_lent_table_too(tiny: Any) -> None:
    """GPT-2 looks up types where it looks up tokens: rows of both get their gradients."""
    splitter = Splitter(tiny.spec("gpt2", "causal-lm", ties="rows"))
    weights, batch = splitter.initial_weights(seed=3), tiny.batch("gpt2", "causal-lm")
    batch["token_type_ids"] = (batch["input_ids"] * 7 + 1) % 50
    whole = splitter.build_whole(weights, trains=True).train()
    whole(**batch).loss.backward()
    embedding, edge = splitter.build_embedding(weights), splitter.build_edge(weights)
    segment = splitter.build_segment(0, splitter.num_blocks, weights)
    _borrow(embedding, edge, batch)
    context = splitter.context(batch)
    edge(segment(embedding(batch), context), context).backward()
    _give_back(embedding, edge, batch)
    (key,) = splitter.ties
    expected = whole.transformer.wte.weight.grad
    assert_near({key: dict(edge.named_parameters())[key].grad}, {key: expected})
