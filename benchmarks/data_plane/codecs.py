"""What a codec does to learning: the built-in task, trained over real frames with each of them.

Control unit, two devices and the edge are hosts of this process, every hop a stream over loopback
TCP. Model, batches, seeds and steps are the same for all; only the codec of the links (or the
precision of the stages) differs. "auto" is what a plan chooses hop by hop. Each is trained from
several seeds (weights and order of the examples), because one says little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import fsum
from statistics import median

import torch
from torch import Tensor

from benchmarks.data_plane.job import TOKEN
from collapipe_flwr.config.schema import AppConfig, LinksConfig
from collapipe_flwr.core.domain import ModelProfile
from collapipe_flwr.core.keys import read_assignments
from collapipe_flwr.core.links import LinkConfig
from collapipe_flwr.core.measurements import StageMeasurement
from collapipe_flwr.data.batches import cut_batches, draw_round_examples
from collapipe_flwr.data.tasks import Task, load_task
from collapipe_flwr.host.server import HostServer
from collapipe_flwr.host.service import HostService
from collapipe_flwr.models.describing import make_spec
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.spec import BatchShape
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.pipeline.config import (
    Execution,
    NextHop,
    Placement,
    SessionKey,
    SessionRequest,
    StageConfig,
)
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.roles import FirstStage
from collapipe_flwr.pipeline.step import MicroBatch
from collapipe_flwr.scheduler.policies import make_scheduler
from collapipe_flwr.scheduler.protocol import SchedulerConfig
from collapipe_flwr.simulation.world import make_world
from collapipe_flwr.transport.client import Dialer, HostClient
from collapipe_flwr.transport.codec import WIRE_CODECS

DEVICES = ("raspberry-pi-5", "raspberry-pi-4", "raspberry-pi-4")
ROOM = 0.7  # of what all blocks need


def auto_codecs(model: ModelProfile, *, micro_batch: int, micro_batches: int) -> tuple[str, ...]:
    """Codecs from control unit to edge, over two devices."""
    world = make_world(cluster_devices=[DEVICES], examples=[micro_batch * micro_batches])
    batch = micro_batch * micro_batches
    need = sum(block.state_bytes + batch * block.stash_bytes for block in model.blocks)
    (profile,) = world.clusters
    devices = (replace(d, memory_bytes=int(ROOM * need)) for d in profile.devices)
    world = replace(world, clusters=(replace(profile, devices=tuple(devices)),))
    settings = SchedulerConfig(
        micro_batch_sizes=(micro_batch,),
        micro_batches=(micro_batches,),
        codecs=LinksConfig().codecs,
    )
    scheduler, snapshot = make_scheduler("dssda", settings), world.snapshot(1, model)
    plan, _ = scheduler.step(scheduler.init(snapshot), snapshot)
    return tuple(hop.codec for hop in plan.clusters[0].hops)


AUTO = "auto"
_KEY = SessionKey(session_id="codecs", token=TOKEN)
_HOPS = 3
_LAST_SHARE = 0.1  # of the steps: their mean loss is the final one


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTask:
    """How long to train: the demo's model on number words, batches of two micro-batches."""

    steps: int = 60
    micro_batch: int = 32
    micro_batches: int = 2
    learning_rate: float = 2e-3
    test_examples: int = 200
    seeds: tuple[int, ...] = (7,)
    codecs: tuple[str, ...] = (*WIRE_CODECS, AUTO)

    @property
    def variants(self) -> tuple[Execution, ...]:
        """Exact links first, the other codecs, and last bfloat16 inside the stages."""
        coded = (Execution(codec=codec) for codec in self.codecs if codec != "fp32")
        return (Execution(), *coded, Execution(precision="bf16"))

    @property
    def ticks(self) -> int:
        """Trainings in all."""
        return len(self.variants) * len(self.seeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of one codec: per seed, and the medians; ``link_bytes`` is of one seed."""

    codec: str
    precision: str
    losses: tuple[float, ...]  # training, mean of the last tenth of the steps
    test_losses: tuple[float, ...]  # of the trained weights, computed exactly
    metric_name: str
    metrics: tuple[float, ...]
    link_bytes: int
    loss: float
    test_loss: float
    metric: float
    loss_over_fp32: float  # median of the ratios seed by seed
    hops: tuple[str, ...]  # codecs from control unit to edge


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """What all codecs share under one seed."""

    case: CodecTask
    seed: int
    task: Task
    splitter: Splitter


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """One codec under one seed."""

    loss: float
    test_loss: float
    metric: float
    link_bytes: int


def train_with_codecs(
    case: CodecTask, tick: Callable[[str], None] = lambda _: None
) -> tuple[Trained, ...]:
    """Train once per variant and seed from the same weights; the exact one is the yardstick."""
    trials = [make_trial(case, seed) for seed in case.seeds]
    exact: list[_Outcome] = []
    done: list[Trained] = []
    for execution in case.variants:
        hops = _hops(case, execution.codec, trials[0].task, trials[0].splitter)
        outcomes = []
        for trial in trials:
            outcomes.append(_outcome(trial, hops, execution.precision))
            tick(execution.codec)
        exact = exact or outcomes
        done.append(
            Trained(
                codec=execution.codec,
                precision=execution.precision,
                losses=tuple(o.loss for o in outcomes),
                test_losses=tuple(o.test_loss for o in outcomes),
                metric_name=trials[0].task.metric_name,
                metrics=tuple(o.metric for o in outcomes),
                link_bytes=outcomes[0].link_bytes,
                loss=median(o.loss for o in outcomes),
                test_loss=median(o.test_loss for o in outcomes),
                metric=median(o.metric for o in outcomes),
                loss_over_fp32=median(
                    o.loss / e.loss for o, e in zip(outcomes, exact, strict=True)
                ),
                hops=hops,
            )
        )
    return tuple(done)


def make_trial(case: CodecTask, seed: int) -> _Trial:
    """The task and the model of one seed."""
    config = AppConfig()
    task = load_task(replace(config.data, seed=seed))
    return _Trial(case=case, seed=seed, task=task, splitter=_splitter(config, task))


def _outcome(trial: _Trial, hops: tuple[str, ...], precision: str) -> _Outcome:
    with _Chain(trial, hops, precision) as chain:
        losses = [chain.step(batch) for batch in batches_of(trial)]
        weights, link_bytes = chain.finish()
    test = _tested(trial, weights)
    return _Outcome(
        loss=_final(losses),
        test_loss=test["loss"],
        metric=test[trial.task.metric_name],
        link_bytes=link_bytes,
    )


def _hops(case: CodecTask, codec: str, task: Task, splitter: Splitter) -> tuple[str, ...]:
    """The codec of every hop."""
    if codec != AUTO:
        return (codec,) * _HOPS
    batch = task.collate(task.train.select(range(case.micro_batch)).to_list())
    shape = BatchShape(
        source_length=batch["input_ids"].shape[1], target_length=batch["labels"].shape[1]
    )
    return auto_codecs(
        profile_model(splitter, shape),
        micro_batch=case.micro_batch,
        micro_batches=case.micro_batches,
    )


def _splitter(config: AppConfig, task: Task) -> Splitter:
    tokenizer = task.tokenizer
    return Splitter(
        make_spec(
            task.model_task,
            model_type=config.model.type,
            overrides=read_assignments(config.model.overrides),
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )


def batches_of(trial: _Trial) -> Iterator[list[MicroBatch]]:
    """The micro-batches of every step."""
    case, task, splitter = trial.case, trial.task, trial.splitter
    size = case.micro_batch * case.micro_batches
    rows = draw_round_examples(
        task.train, seed=trial.seed, rounds_done=0, cluster_id=0, limit=case.steps * size
    )
    for batch in cut_batches(rows, size):
        tensors = [task.collate(examples) for examples in cut_batches(batch, case.micro_batch)]
        yield [
            MicroBatch(
                inputs=t,
                context=splitter.context(t),
                weight=splitter.weight_of(t),
            )
            for t in tensors
        ]


class _Chain:
    """Control unit -> device -> device -> edge over sockets, with a codec on every link."""

    def __init__(self, trial: _Trial, hops: Sequence[str], precision: str) -> None:
        self._splitter, self._seed, self._hops = trial.splitter, trial.seed, hops
        self._precision = precision
        self._rule = OptimizerConfig(learning_rate=trial.case.learning_rate, weight_decay=0.0)
        self._stack = ExitStack()
        self._clients: list[HostClient] = []

    def __enter__(self) -> _Chain:
        with ExitStack() as stack:
            servers = [
                stack.enter_context(
                    HostServer("127.0.0.1:0", HostService(connect=Dialer(name=f"host {index}")))
                )
                for index in range(3)
            ]
            addresses = [server.address for server in servers]
            self._clients = [stack.enter_context(HostClient(a)) for a in addresses]
            weights = self._splitter.initial_weights(self._seed)
            for index, client in enumerate(self._clients):
                session = client.open_session(self._request(index, addresses))
                session.push_weights(self._owned(weights, index))
            first = self._clients[0].get_session(_KEY)
            link = first.stream(config=LinkConfig(codec=self._hops[0]))
            stack.enter_context(closing(link))
            part = self._splitter.build_embedding(weights)
            optimizer = Optimizer(self._rule, part.named_parameters())
            self._first = FirstStage(
                part,
                optimizer,
                StageConfig(name="control unit", execution=Execution(precision=self._precision)),
                downstream=link,
            )
            self._link = link
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, batch: Sequence[MicroBatch]) -> float:
        """One optimiser step; its loss."""
        return self._first.train_step(batch).loss

    def finish(self) -> tuple[dict[str, Tensor], int]:
        """The trained weights and the bytes of all links."""
        self._first.finish()
        self._link.close()
        weights = dict(self._first.part.state_dict())
        reports: list[StageMeasurement] = [self._first.report()]
        for client in self._clients:
            session = client.get_session(_KEY)
            weights |= session.fetch_weights()
            reports.append(session.report())
        return weights, sum(r.sent_down.bytes + r.received_down.bytes for r in reports)

    def _blocks(self, index: int) -> tuple[int, int] | None:
        half = self._splitter.num_blocks // 2
        return ((0, half), (half, self._splitter.num_blocks), None)[index]

    def _owned(self, weights: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
        blocks = self._blocks(index)
        split = self._splitter
        keys = split.edge_keys() if blocks is None else split.segment_keys(*blocks)
        return {key: weights[key] for key in (*keys, *split.shared_keys)}

    def _request(self, index: int, addresses: Sequence[str]) -> SessionRequest:
        blocks, placement = self._blocks(index), None
        if blocks is not None:
            link = LinkConfig(codec=self._hops[index + 1])
            hop = NextHop(address=addresses[index + 1], key=_KEY, link=link)
            placement = Placement(blocks=blocks, next_hops=(hop,))
        execution = Execution(precision=self._precision)
        return SessionRequest(
            key=_KEY,
            spec_json=self._splitter.spec.to_json(),
            stage=StageConfig(name=f"host {index}", execution=execution),
            placement=placement,
            optimizer=self._rule,
        )


def _final(losses: Sequence[float]) -> float:
    """The mean over the last tenth."""
    last = losses[-max(1, round(_LAST_SHARE * len(losses))) :]
    return fsum(last) / len(last)


def _tested(trial: _Trial, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Loss and metrics on unseen examples by the unsplit model in single precision."""
    case, task = trial.case, trial.task
    model = trial.splitter.build_whole(weights)
    rows = task.test.select(range(min(case.test_examples, len(task.test)))).to_list()
    batch = task.collate(rows)
    with torch.inference_mode():
        loss = float(model(**batch).loss)
        generated = model.generate(  # type: ignore[operator]
            batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=task.settings.max_target_length,
            num_beams=1,
            do_sample=False,
        )
    tally = task.count(task.read(generated, batch), task.references(rows, batch))
    return {"loss": loss, **task.score(tally)}
