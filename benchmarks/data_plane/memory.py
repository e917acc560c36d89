"""Peak memory of a device process against a client that trains the whole model, from outside.

Both are real processes, and what is compared is what the kernel counted as their largest resident
size (`VmHWM`), interpreter and libraries included. The whole model is trained as plain federated
averaging would: the same micro-batches, one after the other, the same optimiser. The devices run
in a chain over gRPC, with re-computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.data_plane.crew import Crew
from benchmarks.data_plane.job import TOKEN
from benchmarks.data_plane.network import Loopback
from benchmarks.data_plane.ours import OPTIMIZER
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape, ModelSpec
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import (
    Execution,
    NextHop,
    Placement,
    SessionKey,
    SessionRequest,
    StageConfig,
)
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.pipeline.step import MicroBatch
from collapipe_flwr.transport.client import HostClient

CLASSES = 4
_KEY = SessionKey(session_id="memory", token=TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """An encoder of equal blocks over equal devices; two steps, so that all state exists."""

    blocks: int = 12
    width: int = 768
    vocabulary: int = 30_522
    tokens: int = 128
    micro_batch: int = 8
    micro_batches: int = 2
    devices: int = 4
    recompute: bool = True
    steps: int = 2

    def spec(self) -> ModelSpec:
        """BERT of this size with a head of a few classes."""
        return make_spec(
            "sequence-classification",
            model_type="bert",
            overrides={
                "hidden_size": self.width,
                "num_hidden_layers": self.blocks,
                "num_attention_heads": self.width // 64,
                "intermediate_size": 4 * self.width,
                "hidden_dropout_prob": 0.0,
                "attention_probs_dropout_prob": 0.0,
            },
            vocab_size=self.vocabulary,
            pad_token_id=0,
            num_labels=CLASSES,
        )

    def batch(self) -> list[dict[str, Tensor]]:
        """The micro-batches of every step."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.micro_batch, self.tokens)
        return [
            {
                "input_ids": torch.randint(1, self.vocabulary, shape, generator=generator),
                "attention_mask": torch.ones(shape, dtype=torch.long),
                "labels": torch.randint(0, CLASSES, shape[:1], generator=generator),
            }
            for _ in range(self.micro_batches)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """Largest resident sizes; ``*_idle_bytes`` before a model came.

    ``device_state_bytes`` are weights, gradients and optimiser state of the fullest device, and
    ``device_floor_bytes`` adds the activations that the schedule needs: no device can be below.
    """

    device_peak_bytes: int
    device_state_bytes: int
    device_floor_bytes: int
    device_idle_bytes: int
    whole_model_peak_bytes: int
    whole_model_idle_bytes: int
    device_peaks_bytes: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """The largest device over the whole model."""
        return self.device_peak_bytes / self.whole_model_peak_bytes


def measure_memory(case: MemoryCase) -> MemoryResult:
    """Train both ways, one after the other; takes about a minute at the usual size."""
    whole_idle, whole_peak = _whole(case)
    idle, peaks = _devices(case)
    state_bytes, floor_bytes = least_bytes(case)
    return MemoryResult(
        device_peak_bytes=max(peaks),
        device_state_bytes=state_bytes,
        device_floor_bytes=floor_bytes,
        device_idle_bytes=max(idle),
        whole_model_peak_bytes=whole_peak,
        whole_model_idle_bytes=whole_idle,
        device_peaks_bytes=tuple(peaks),
    )


def least_bytes(case: MemoryCase) -> tuple[int, int]:
    """State of the fullest device, and with the activations of all micro-batches at once.

    With re-computation those are the inputs of the device's blocks, and all that one block keeps.
    """
    profile = profile_model(Splitter(case.spec()), BatchShape(source_length=case.tokens))
    each = case.blocks // case.devices
    states, floors = [], []
    for first in range(0, case.blocks, each):
        blocks = profile.blocks[first : first + each]
        inputs = each * profile.embedding.output_bytes
        stash = sum(block.stash_bytes for block in blocks)
        kept = case.micro_batches * (inputs if case.recompute else stash)
        once = max(block.stash_bytes for block in blocks) if case.recompute else 0.0
        states.append(sum(block.state_bytes for block in blocks))
        floors.append(states[-1] + round(case.micro_batch * (kept + once)))
    return max(states), max(floors)


def train_whole_model(case: MemoryCase) -> None:
    """What the client of the comparison does in its process."""
    from collapipe_flwr.cluster.unsplit import train_unsplit

    splitter = Splitter(case.spec())
    model = splitter.build_whole(splitter.initial_weights(0))
    optimizer = Optimizer(OPTIMIZER, model.named_parameters())
    train_unsplit(splitter, model, optimizer, [case.batch()] * case.steps)


def _whole(case: MemoryCase) -> tuple[int, int]:
    from collapipe_flwr.core.json_codec import to_json

    with Crew(1, Loopback()) as crew:
        idle: int = crew.ask(0, "usage")["peak_bytes"]
        crew.ask(0, "whole", case=to_json(case))
        return idle, crew.ask(0, "usage")["peak_bytes"]


def _devices(case: MemoryCase) -> tuple[list[int], list[int]]:
    """Idle and peak bytes of every device; this process is control unit, one more the edge."""
    splitter = Splitter(case.spec())
    weights = splitter.initial_weights(0)
    with Crew(case.devices + 1, Loopback()) as crew:
        hosts = range(case.devices + 1)
        addresses = [crew.ask(host, "host") for host in hosts]
        idle = [crew.ask(device, "usage")["peak_bytes"] for device in hosts[:-1]]
        clients = [HostClient(address) for address in addresses]
        for index, client in enumerate(clients):
            session = client.open_session(_request(case, splitter.spec, index, addresses))
            session.push_weights(_owned(splitter, weights, case, index))
        _train(case, splitter, weights, clients[0])
        peaks = [crew.ask(device, "usage")["peak_bytes"] for device in hosts[:-1]]
        for client in clients:
            client.get_session(_KEY).close()
            client.close()
    return idle, peaks


def _train(
    case: MemoryCase, splitter: Splitter, weights: dict[str, Tensor], client: HostClient
) -> None:
    part = splitter.build_embedding(weights)
    link = client.get_session(_KEY).stream()
    settings = StageConfig(name="control unit", deadline_s=300.0)
    first = FirstStage(
        part, Optimizer(OPTIMIZER, part.named_parameters()), settings, downstream=link
    )
    batch = [
        MicroBatch(inputs=t, context=splitter.context(t), weight=float(case.micro_batch))
        for t in case.batch()
    ]
    for _ in range(case.steps):
        first.train_step(batch)
    first.finish()
    link.close()


def _blocks(case: MemoryCase, index: int) -> tuple[int, int] | None:
    """The blocks of one host; None for the edge."""
    each = case.blocks // case.devices
    return (index * each, (index + 1) * each) if index < case.devices else None


def _owned(
    splitter: Splitter, weights: dict[str, Tensor], case: MemoryCase, index: int
) -> dict[str, Tensor]:
    blocks = _blocks(case, index)
    keys = splitter.edge_keys() if blocks is None else splitter.segment_keys(*blocks)
    return {key: weights[key] for key in (*keys, *splitter.shared_keys)}


def _request(case: MemoryCase, spec: ModelSpec, index: int, addresses: list[str]) -> SessionRequest:
    blocks, placement = _blocks(case, index), None
    if blocks is not None:
        hop = NextHop(address=addresses[index + 1], key=_KEY)
        placement = Placement(blocks=blocks, next_hops=(hop,))
    execution = Execution(recompute=case.recompute)
    return SessionRequest(
        key=_KEY,
        spec_json=spec.to_json(),
        stage=StageConfig(name=f"host {index}", deadline_s=300.0, execution=execution),
        placement=placement,
        optimizer=OPTIMIZER,
    )
