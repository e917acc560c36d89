"""One role in a process of its own: build the part, train some steps, print the peak in bytes.

Run as ``python -m benchmarks.memory.role ORDER`` with a `RoleOrder` as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# What a daemon or a ClientApp has loaded counts as well.
import collapipe_flwr.host.servicer
import collapipe_flwr.transport.client  # noqa: F401
from benchmarks.memory.footprint import RoleOrder
from benchmarks.memory.neighbours import (
    ID,
    WAIT_S,
    NearFleet,
    OwnEdge,
    answer,
    answering_thread,
)
from benchmarks.plans import make_plan, spread_evenly
from benchmarks.resident import AnonymousPeak, file_bytes, peak_bytes
from collapipe_flwr.cluster.control_unit import train_round
from collapipe_flwr.cluster.hosted import HostedEdge
from collapipe_flwr.cluster.order import LearningSettings, TrainingOrder
from collapipe_flwr.cluster.unsplit import train_unsplit
from collapipe_flwr.core.processes import end_with_parent
from collapipe_flwr.host.allocator import configure_malloc, trim_heap
from collapipe_flwr.models.checkpoint import CheckpointSource
from collapipe_flwr.models.lora import add_adapters, draw_adapter, is_adapter
from collapipe_flwr.models.spec import ModelSpec, spec_of
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.tasks import find_auto_class
from collapipe_flwr.pipeline.config import StageConfig
from collapipe_flwr.pipeline.link import (
    HIDDEN,
    LEARNS,
    Frame,
    FrameKind,
    Link,
    make_memory_pair,
)
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import LastStage, MiddleStage
from collapipe_flwr.pipeline.step import MicroBatch, Step

RULE = OptimizerConfig(name="adamw", learning_rate=1e-4)
SETTINGS = StageConfig(name="stage", deadline_s=WAIT_S)


class Player:
    """Plays one role of one model; neighbours are threads that answer with random frames."""

    def __init__(self, order: RoleOrder) -> None:
        torch.set_num_threads(1)
        self._order = order
        spec = spec_of(order.spec_json)
        assert isinstance(spec, ModelSpec)
        self._splitter = Splitter(spec)
        self._source = CheckpointSource(self._splitter.spec)

    def whole(self) -> None:
        """The unsplit model as a plain client trains it: the library's, with peft's adapters."""
        splitter, spec = self._splitter, self._splitter.spec
        builder = find_auto_class(spec.task, splitter.config)
        model = builder.from_pretrained(spec.pretrained, dtype=torch.float32)
        model.config.use_cache = False
        if spec.lora is not None:
            add_adapters(model, spec, on_meta=False)
        steps = [[self._batch()]] * self._order.steps
        optimizer = Optimizer(RULE, model.named_parameters())
        train_unsplit(splitter, model, optimizer, steps)

    def control_unit_and_edge(self) -> None:
        """A round of a control unit that serves its cluster's edge."""
        from collapipe_flwr.host.server import HostServer
        from collapipe_flwr.host.service import HostService

        with HostServer("127.0.0.1:0", service := HostService(most_sessions=1)) as server:
            self.control_unit(
                OwnEdge(
                    address=server.address,
                    service=service,
                    deadline_s=WAIT_S,
                    feed=lambda link, tell: self._feed(link, learns=True, tell=tell),
                )
            )

    def control_unit(self, edge: HostedEdge | None = None) -> None:
        """A round, from all that Flower's message carries to all that the reply does."""
        from flwr.app import RecordDict

        from collapipe_flwr.federation.arrays import encode_tensors, offload_tensors, take_record
        from collapipe_flwr.federation.bundles import bundle, unbundle

        splitter, order = self._splitter, self._order
        keys = splitter.all_keys()
        message = encode_tensors({})
        for key in keys:
            message.update(encode_tensors(self._weights([key])))
        content = RecordDict({"arrays": message})
        del message  # bundling leaves a record that somebody else holds as it is
        bundle(content)  # as it comes
        unbundle(content)
        weights = offload_tensors(content.array_records["arrays"])
        trim_heap()
        batch = self._batch()
        micro_batch = MicroBatch(
            inputs=batch,
            context=splitter.context(batch),
            weight=splitter.weight_of(batch),
        )
        asked = TrainingOrder(
            plan=make_plan(
                ID, spread_evenly(splitter.num_blocks, order.devices), steps=order.steps
            ),
            weights=weights,
            learning=LearningSettings(optimizer=RULE, deadline_s=WAIT_S),
        )
        fleet = NearFleet.of(splitter, order.devices, edge)
        result = train_round(splitter, asked, [[micro_batch]] * order.steps, fleet)
        content["arrays"] = reply = take_record(result.weights)
        assert len(reply) == len(keys)
        del reply
        bundle(content)

    def device(self) -> None:
        """A segment between two neighbours."""
        blocks = self._order.first_block, self._order.stop_block
        splitter = self._splitter
        keys = (*splitter.segment_keys(*blocks), *splitter.shared_keys)
        part = splitter.build_segment(*blocks, self._weights(keys))
        up, own_up = make_memory_pair("before", "stage")
        own_down, down = make_memory_pair("stage", "behind")
        stage = MiddleStage(
            part,
            Optimizer(RULE, part.named_parameters()),
            SETTINGS,
            upstream=own_up,
            downstream=own_down,
        )
        threads = [answering_thread(stage.serve), answering_thread(lambda: answer(down))]
        self._feed(up, learns=self._order.first_block > 0)
        for thread in threads:
            thread.join(WAIT_S)

    def edge(self) -> None:
        """What stands behind the devices."""
        splitter = self._splitter
        keys = (*splitter.edge_keys(), *splitter.shared_keys)
        part = splitter.build_edge(self._weights(keys))
        up, own_up = make_memory_pair("before", "stage")
        stage = LastStage(part, Optimizer(RULE, part.named_parameters()), SETTINGS, upstream=own_up)
        serving = answering_thread(stage.serve)
        self._feed(up, learns=True)
        serving.join(WAIT_S)

    def _feed(self, link: Link, *, learns: bool, tell: Callable[[], None] = lambda: None) -> None:
        """Play the stages before: one micro-batch per step; ``tell`` of each but the last."""
        batch, width = self._batch(), self._splitter.config.hidden_size
        weight = float(self._splitter.weight_of(batch))
        scalars = {"weight": weight, "scale": 1.0, LEARNS: float(learns or not self._frozen())}
        for index in range(self._order.steps):
            step = Step(index=index, micro_batches=1, train=True, weight=weight)
            link.send(step.make_frame(), deadline_s=WAIT_S)
            hidden = torch.randn(self._order.examples, self._order.tokens, width)
            tensors = {**self._splitter.context(batch), HIDDEN: hidden}
            frame = Frame(kind=FrameKind.ACTIVATION, step=index, tensors=tensors, scalars=scalars)
            link.send(frame, deadline_s=WAIT_S)
            link.receive(deadline_s=WAIT_S)
            if index < self._order.steps - 1:
                tell()
        link.send(Frame(kind=FrameKind.END, step=self._order.steps), deadline_s=WAIT_S)

    def _frozen(self) -> bool:
        return self._splitter.spec.lora is not None

    def _batch(self) -> dict[str, Tensor]:
        shape = (self._order.examples, self._order.tokens)
        tokens = torch.randint(5, 1000, shape, generator=torch.Generator().manual_seed(0))
        labels = tokens[:, 0] % 4 if self._splitter.task.label_per_example else tokens
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    def _weights(self, keys: Iterable[str]) -> dict[str, Tensor]:
        """What travels, as if it had come in a message."""
        shapes = self._splitter.shapes
        return {
            key: draw_adapter(key, shapes[key][0], seed=0)
            if is_adapter(key)
            else self._source.read(key).to(shapes[key][1], copy=True)
            for key in keys
        }


def main() -> None:
    """Play the role of the order on the command line."""
    order = RoleOrder(**json.loads(sys.argv[1]))
    if order.role != "whole":  # our programs set up their heap; a plain client does not
        configure_malloc()
    end_with_parent()
    player = Player(order)
    roles = {
        "whole": player.whole,
        "control-unit": player.control_unit,
        "control-unit-and-edge": player.control_unit_and_edge,
        "device": player.device,
        "edge": player.edge,
    }
    with AnonymousPeak() as anonymous:
        roles[order.role]()
    found = {"resident": peak_bytes(), "anonymous": anonymous.bytes, "files": file_bytes()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
