"""Re-computation, clipping and seeded dropout: each equals its unsplit, plain counterpart."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from collapipe_flwr.core.errors import Blame, LinkError, MemberFailed
from collapipe_flwr.pipeline.config import Execution, StageConfig
from collapipe_flwr.pipeline.link import GRAD, HIDDEN, make_memory_pair
from collapipe_flwr.pipeline.optimizer import Optimizer
from collapipe_flwr.pipeline.roles import FirstStage
from tests.closeness import assert_near, near
from tests.pipeline.chains import SGD, Chain, classic, make_batch, make_parts, settings, whole_loss

BATCH = (3, 3, 2)


def options(schedule: str = "1f1b", seed: int | None = None, **execution):
    more = {"seed": seed, "execution": Execution(**execution)}
    return lambda name, index, stages: replace(settings(name, schedule, stages - index), **more)


def with_dropout(parts, probability: float):
    for part in parts:
        for module in part.modules():
            if isinstance(module, nn.Dropout):
                module.p = probability
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = probability
    return parts


def trained_weights(parts, make_settings, steps: int = 2):
    """Losses and weights after some steps."""
    chain = Chain(parts, make_settings)
    with chain.running() as first:
        losses = [first.train_step(make_batch(BATCH, seed)).loss for seed in range(steps)]
    weights = [p.detach() for part in parts for p in part.parameters()]
    return losses, weights, [stage.report() for stage in chain.stages]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_that_is_not_finite_names_the_stage_that_made_it(recompute):
    parts = make_parts((1, 1, 1))
    plain = parts[2].forward
    # The root of 0 is 0, and its slope is infinite.
    parts[2].forward = lambda hidden, context: plain(hidden + (hidden * 0).abs().sqrt(), context)
    chain = Chain(parts, options(check_finite=True, recompute=recompute))
    told = "backward pass of device 2 in step 0, micro-batch 0, made finite numbers"
    with pytest.raises(LinkError, match=told), chain.running() as first:
        first.train_step(make_batch(BATCH))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_recomputing_changes_memory_and_no_bit_of_the_result(schedule, probability):
    def run(recompute: bool):
        parts = with_dropout(make_parts((2, 1)), probability)
        return trained_weights(parts, options(schedule, recompute=recompute, seed=5))

    losses, weights, reports = run(False)
    again, again_weights, again_reports = run(True)
    assert again == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, again_weights, strict=True))
    assert again_reports[1].peak_tensor_bytes < reports[1].peak_tensor_bytes


def test_recomputing_with_dropout_and_no_seed_draws_the_same_masks_twice():
    parts = with_dropout(make_parts((1,)), 0.5)
    chain = Chain(parts, options(recompute=True))
    outputs = []
    plain = parts[1].forward
    parts[1].forward = lambda *args: outputs.append(plain(*args)) or outputs[-1]
    with chain.running() as first:
        first.train_step(make_batch((4,)))
    assert len(outputs) == 2
    assert torch.equal(outputs[0], outputs[1])


def test_dropout_does_not_depend_on_the_cut():
    """Every cut names its blocks as the whole model does, as the parts of transformers do."""
    results = []
    for cut, schedule in (((3,), "gpipe"), ((1, 2), "1f1b"), ((1, 1, 1), "gpipe")):
        parts = with_dropout(make_parts(cut), 0.3)
        for part in parts:
            part.model = _absolute(parts, part)
        losses, _, _ = trained_weights(parts, options(schedule, seed=7))
        results.append(losses)
    assert results[0] == near(results[1])
    assert results[0] == near(results[2])
    parts = with_dropout(make_parts((3,)), 0.3)
    assert trained_weights(parts, options(seed=8))[0] != pytest.approx(results[0], rel=1e-3)


class _Named(nn.Module):
    """Holds modules under chosen names."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._found = modules

    def named_modules(self, *args, **kwargs):
        del args, kwargs
        for name, module in self._found.items():
            yield from module.named_modules(prefix=name)


def _absolute(parts, part):
    blocks = [block for p in parts if hasattr(p, "blocks") for block in p.blocks]
    own = getattr(part, "blocks", ())
    return _Named({f"block{i}": b for i, b in enumerate(blocks) if any(b is o for o in own)})


@pytest.mark.parametrize("clip_norm", [0.05, 1e6])
def test_clipping_equals_clipping_the_whole_model(clip_norm):
    batch = make_batch(BATCH)
    wholes = make_parts((1, 2))
    whole_loss(wholes, batch).backward()
    everything = [p for part in wholes for p in part.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(everything, clip_norm)
    parts = make_parts((1, 2))
    chain = Chain(parts, classic("1f1b"), rule=SGD)
    chain.first._clip_norm = clip_norm
    with chain.running() as first:
        result = first.train_step(batch)
        assert first.evaluate(batch).gradient_norm is None
    assert result.gradient_norm == near(norm.item())
    mine = [p for part in parts for p in part.parameters()]
    assert_near(mine, [q - 0.5 * q.grad for q in everything])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_stage_whose_gradient_is_not_finite_blames_itself_and_no_stage_takes_the_step(broken):
    parts = make_parts((1, 2))
    before = [p.detach().clone() for part in parts for p in part.parameters()]
    parts[2].blocks[0].linear1.bias.register_hook(lambda g: torch.full_like(g, broken))
    chain = Chain(parts, options("1f1b", clip_norm=0.05), rule=SGD)
    with pytest.raises(MemberFailed) as failure, chain.running() as first:
        first.train_step(make_batch(BATCH))
    error = failure.value
    assert (error.witness, error.side, error.blame) == ("device 2", 0, Blame.UNSOUND)
    after = [p for part in parts for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_with_clipping_no_stage_applies_a_step_that_another_could_not_finish():
    """The first stage computes last: if it fails there, all others have done their backwards."""
    parts = make_parts((1, 1))
    before = [p.detach().clone() for part in parts for p in part.parameters()]
    chain = Chain(parts, classic("gpipe"))
    chain.first._clip_norm = 1.0

    def fail(_):
        raise RuntimeError("power cut")

    chain.first._emit_gradient = fail
    with pytest.raises((RuntimeError, LinkError), match="power cut"), chain.running() as first:
        first.train_step(make_batch((2, 2)))
    after = [p for part in parts for p in part.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert len(chain.failures) == 3


NO_COMPILER = """
import sys
import torch
from dataclasses import replace
from collapipe_flwr.pipeline.config import Execution
from collapipe_flwr.pipeline.optimizer import Optimizer, OptimizerConfig
from collapipe_flwr.pipeline.optimizer_settings import list_rule_names
from tests.pipeline.chains import Chain, classic, make_batch, make_parts
recomputing = Execution(recompute=True)
settings = lambda *place: replace(classic("1f1b")(*place), seed=1, execution=recomputing)
with Chain(make_parts((1,)), settings).running() as first:
    first.train_step(make_batch((2, 2)))
for name in list_rule_names():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    optimizer = Optimizer(OptimizerConfig(name=name), [("weight", weight)])
    optimizer.step()
    optimizer.make_meta_state()
print(name, "torch._dynamo" in sys.modules)
"""


def test_neither_a_step_nor_any_optimizer_imports_the_compiler():
    """Importing torch._dynamo costs a small board 70 MB and seconds."""
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], capture_output=True, text=True, timeout=250
    )
    assert done.stdout.split()[1:] == ["False"], done.stderr


class _Copying:
    """A link that hands over copies, as a wire does, and counts which of the originals live."""

    def __init__(self, link) -> None:
        self._link = link
        self._sent: list[weakref.ref] = []
        self.most_alive = 0

    def __getattr__(self, name):
        return getattr(self._link, name)

    def send(self, frame, *, deadline_s):
        if hidden := [t for name, t in frame.tensors.items() if name in (HIDDEN, GRAD)]:
            self._sent += map(weakref.ref, hidden)
            self.most_alive = max(self.most_alive, self.alive())
        copies = {name: tensor.clone() for name, tensor in frame.tensors.items()}
        self._link.send(replace(frame, tensors=copies), deadline_s=deadline_s)

    def alive(self) -> int:
        return sum(reference() is not None for reference in self._sent)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_was_sent_is_kept_until_the_next_frame_and_no_longer(schedule):
    chain = Chain(make_parts((1,)), options(schedule))
    first, device, _ = chain.stages
    down, up = _Copying(first.downstream), _Copying(device.upstream)
    first.downstream = down
    device.upstream = up
    with chain.running():
        for seed in range(2):
            first.train_step(make_batch(BATCH, seed))
            assert down.alive() == 0
    assert (down.most_alive, up.most_alive) == (1, 1)
    assert up.alive() == 0


class _Blocks(nn.Module):
    """A part that knows its blocks, and is told what to enter around each."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(4, 4)

    def compute_again(self, around):
        self.around = around


def test_a_part_that_computes_its_blocks_again_goes_with_its_stage():
    part = _Blocks()
    link, _ = make_memory_pair("stage", "behind")
    chosen = StageConfig(name="stage", seed=1, execution=Execution(recompute=True))
    stage = FirstStage(part, Optimizer(SGD, part.named_parameters()), chosen, downstream=link)
    with part.around():  # while the stage lives
        gone = weakref.ref(part)
    gc.disable()
    try:
        del part, stage
        assert gone() is None
    finally:
        gc.enable()
