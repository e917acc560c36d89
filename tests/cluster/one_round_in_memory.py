"""A round of a control unit, from message to reply; prints the bytes of the message, and by how
much its process grew at most while it had it in memory.

    python -m tests.cluster.one_round_in_memory
"""

from __future__ import annotations

import json

import torch

from benchmarks.memory.neighbours import ID, NearFleet
from benchmarks.plans import make_plan, spread_evenly
from benchmarks.resident import forget_peak, peak_bytes, resident_bytes
from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.federation.arrays import encode_tensors, offload_tensors, take_record
from collapipe_flwr.host.allocator import configure_malloc, trim_heap
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.step import MicroBatch

DEVICES, STEPS = 2, 2


def main() -> None:
    """See the module."""
    configure_malloc()
    torch.set_num_threads(1)
    splitter = Splitter(
        make_spec(
            "sequence-classification",
            model_type="bert",
            overrides={
                "hidden_size": 512,
                "num_hidden_layers": 12,
                "num_attention_heads": 4,
                "intermediate_size": 2048,
            },
            vocab_size=1000,
            num_labels=2,
        )
    )
    fleet = NearFleet.of(splitter, DEVICES)
    batch = {"input_ids": torch.ones(1, 16, dtype=torch.long), "labels": torch.zeros(1).long()}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    step = [MicroBatch(inputs=batch, context=splitter.context(batch), weight=1)]
    keys = splitter.all_keys()
    message = encode_tensors({key: torch.ones(splitter.shapes[key][0]) for key in keys})
    message_bytes = sum(len(array.data) for array in message.values())
    trim_heap()
    before_bytes = resident_bytes()
    forget_peak()
    order = TrainingOrder(
        plan=make_plan(ID, spread_evenly(splitter.num_blocks, DEVICES), steps=STEPS),
        weights=offload_tensors(message),
        learning=LearningSettings(),
    )
    trim_heap()
    result = train_round(splitter, order, [step] * STEPS, fleet)
    assert len(take_record(result.weights)) == len(keys)
    print(json.dumps([message_bytes, peak_bytes() - before_bytes]))


if __name__ == "__main__":
    main()
