"""The default part of the edge is cut from a transformers model by its description alone."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig

from collapipe_flwr.core.errors import LinkError, ModelError
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.models.spec import ModelSpec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.transport.client import HostClient
from tests.closeness import assert_near, near
from tests.host.chain_to_edge import Cluster, request, session_key
from tests.pipeline.chains import SGD, MicroBatch, Optimizer


def tiny_bert() -> Splitter:
    config = BertConfig(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    text = config.to_json_string(use_diff=False)
    return Splitter(ModelSpec(task="sequence-classification", config_json=text))


def test_a_round_of_bert_equals_the_whole_model():
    splitter = tiny_bert()
    weights = splitter.initial_weights(seed=0)
    batch = [micro_batch(splitter, size) for size in (3, 2)]
    parts = [splitter.build_embedding(weights), splitter.build_segment(0, 2, weights)]
    with HostServer("127.0.0.1:0", HostService()) as server, HostClient(server.address) as client:
        client.open_session(request(spec_json=splitter.spec.to_json()))
        client.get_session(session_key()).push_weights(
            {k: weights[k] for k in splitter.edge_keys()}
        )
        with Cluster(parts, client.get_session(session_key()).stream()).running() as first:
            loss = first.train_step(batch).loss
        trained = client.get_session(session_key()).fetch_weights()
    for part in parts:
        trained.update(part.state_dict())
    expected_loss, expected = one_process(splitter, weights, batch)
    assert loss == near(expected_loss)
    assert trained.keys() == weights.keys()
    assert_near({key: trained[key] for key in expected}, expected)


def micro_batch(splitter: Splitter, size: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(1, 31, (size, 5), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 3}
    return MicroBatch(inputs=inputs, context=splitter.context(inputs), weight=size)


def one_process(splitter, weights, batch):
    whole = splitter.build_whole(weights)
    optimizer = Optimizer(SGD, whole.named_parameters())
    names = batch[0].inputs
    loss = whole(**{name: torch.cat([m.inputs[name] for m in batch]) for name in names}).loss
    loss.backward()
    optimizer.step()
    return loss.item(), {k: p.detach() for k, p in whole.named_parameters() if k in weights}


def test_a_description_that_is_none_is_refused_with_its_reason():
    service = HostService()
    service.open(request(spec_json="nonsense"))
    with pytest.raises(ModelError, match="not JSON"):
        service.push_weights(session_key(), {})
    with (
        HostServer("127.0.0.1:0", service) as server,
        HostClient(server.address) as client,
        pytest.raises(LinkError, match=r"edge at .* refused: .*not JSON"),
    ):
        client.get_session(session_key()).push_weights({})
