"""The law of decomposition: what a batch may be cut by.

A batch of examples ``b`` in parts ``p`` may be cut where loss and gradient are means over a weight
``w``: ``L(b) = sum(w(p) L(p)) / sum(w(p))``. Losses that compare examples with one another, or
divide by something else than ``w``, and layers with statistics of the batch obey no such law. Here
it is tried, in training mode, on unequal parts of a few examples whose labels were made as
different as a loader could make them: equal parts would hide a mean of means. Nothing drops out
meanwhile, and every example draws the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.models.any_splitter import AnySplitter
from collapipe_flwr.models.part import Weights
from collapipe_flwr.models.random_functions import draw_alike
from collapipe_flwr.models.skeleton import make_example_inputs
from collapipe_flwr.models.splitter import Splitter
from collapipe_flwr.models.tasks import COUNTED, LABEL_NAMES, LABELS, Batch

CLOSE = 1e-5  # of the largest number: the order of sums may differ
_PARTS = (3, 2, 1)  # examples
_TRIED = sum(_PARTS)
_FACTORS = (0.5, 1.0, 2.0, 1.5, 0.7, 1.2)  # of the float targets, by example
_NONE_LEFT = (1, 2, 0)  # examples without a label, of one tensor after the other
_UNEVEN = 1.01
_MASK = "attention_mask"
_LENGTH = 8  # tokens of a made-up text
_SEVERAL_LABELS = "multi_label_classification"


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """How batches may be cut.

    The loss is a mean over ``weight``, as long as no tensor named in ``complete`` holds an ignored
    label.
    """

    weight: str
    complete: tuple[str, ...]


def find_means(splitter: AnySplitter, weights: Weights, batch: Batch) -> Means | None:
    """Find the weight that obeys the law for batches such as this one; None if none does.

    It is that of ``splitter``, or another one of those that count labels or examples.
    """
    if len({len(tensor) if tensor.dim() else -1 for tensor in batch.values()}) != 1:
        return None
    given = splitter.objective.weight
    counted = given in COUNTED
    numbers = tuple(n for n in _find_integers(splitter, batch) if counted or n != given)
    untried = tuple(n for n in numbers if not _may_be_ignored(splitter, n, batch[n]))
    model = splitter.build_whole(weights, trains=True).train()
    trial = _ModelLosses(splitter, model)
    weighings = list(dict.fromkeys((given, *COUNTED))) if counted else [given]
    for ignoring, complete in ((True, untried), (False, numbers)):
        for weight in weighings:
            if trial.obeys(weight, batch, ignoring=ignoring):
                return Means(weight=weight, complete=complete)
        if any(bool((batch[name] < 0).any()) for name in numbers):
            break
    return None


def make_up_batch(splitter: Splitter) -> dict[str, Tensor]:
    """Make up examples of one of the library's tasks, with random inputs and labels."""
    random = torch.Generator().manual_seed(2)
    config: Any = splitter.config
    inputs: Any = splitter.input_config
    task = splitter.task
    length = min(_LENGTH, splitter.most_tokens or _LENGTH)
    batch = make_example_inputs(inputs, splitter.input_name, length, examples=_TRIED)
    if splitter.input_name == "input_ids":
        ids = torch.randint(0, inputs.vocab_size, (_TRIED, length), generator=random)
        padding = getattr(inputs, "pad_token_id", None)
        other = ((padding or 0) + 1) % inputs.vocab_size
        batch["input_ids"] = ids if padding is None else ids.where(ids != padding, other)
    else:
        shape = batch[splitter.input_name].shape
        batch[splitter.input_name] = torch.randn(shape, generator=random)
    if task.labelled and (config.num_labels == 1 or config.problem_type == _SEVERAL_LABELS):
        sizes = [_TRIED, config.num_labels][: min(config.num_labels, 2)]
        return {**batch, LABELS: torch.rand(sizes, generator=random).round()}
    classes = config.num_labels if task.labelled else inputs.vocab_size
    places = [_TRIED] if task.label_per_example else [_TRIED, length]
    return {**batch, LABELS: torch.randint(0, classes, places, generator=random)}


class _ModelLosses:
    """Losses and gradients of one model."""

    def __init__(self, splitter: AnySplitter, model: nn.Module) -> None:
        self._splitter, self._model = splitter, model
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def obeys(self, weight: str, batch: Batch, *, ignoring: bool) -> bool:
        """Return whether the most demanding variant that has a loss obeys the law."""
        for variant in _make_variants(self._splitter, batch, ignoring=ignoring):
            with suppress(Exception):  # the user's code cannot read this variant
                found = self._compare(weight, variant)
                if found is not None:
                    return found
        return False

    def _compare(self, weight: str, batch: Batch) -> bool | None:
        """Return whether a batch obeys the law; None if it has no loss, weight or gradient."""
        shares = self._weigh_parts(weight, batch)
        self._model.zero_grad()
        before = [buffer.clone() for buffer in self._model.buffers()]
        loss = self._add_gradient(batch, 1.0)
        largest = self._largest_gradient()
        if not (0 < largest < torch.inf and shares):
            return None
        if not all(map(torch.equal, before, self._model.buffers())):
            return False  # it learns from the batch in other ways than by gradients
        sizes, losses = [largest], [abs(loss)]
        try:
            for part, share in shares:
                found = self._add_gradient(part, -share) * share
                loss -= found
                sizes.append(self._largest_gradient())
                losses.append(abs(found))
        except Exception:  # the loss of fewer examples fails
            return False
        return abs(loss) <= CLOSE * max(losses) and sizes[-1] <= CLOSE * max(sizes)

    def _weigh_parts(self, weight: str, batch: Batch) -> list[tuple[Batch, float]]:
        """Return the parts that weigh anything, and their shares of the batch's weight."""
        objective = replace(self._splitter.objective, weight=weight)
        parts = [dict(zip(batch, tensors, strict=True)) for tensors in _cut(batch)]
        weights = [objective.weight_of(self._splitter.context(part)) for part in parts]
        total = sum(weights)
        return [(p, w / total) for p, w in zip(parts, weights, strict=True) if w and total > 0]

    def _add_gradient(self, batch: Batch, factor: float) -> float:
        """Add ``factor`` times the loss's gradient to the parameters' own; return the loss."""
        with torch.enable_grad(), draw_alike():
            outputs = self._splitter.run_whole(self._model, batch)
            loss = self._splitter.loss_of(outputs, batch)
            if loss.requires_grad:
                torch.autograd.backward(loss * factor)
        return float(loss.detach())

    def _largest_gradient(self) -> float:
        gradients = (p.grad for p in self._trained if p.grad is not None and p.numel())
        found = [float(gradient.abs().max()) for gradient in gradients]
        return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _cut(batch: Batch) -> Iterator[tuple[Tensor, ...]]:
    """Cut the tensors of a batch into consecutive parts."""
    return zip(*(torch.split(tensor, [*_PARTS]) for tensor in batch.values()), strict=True)


def _make_variants(
    splitter: AnySplitter, batch: Batch, *, ignoring: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield few examples with other targets, from the most to the least demanding.

    With ``ignoring`` some labels are marked as ignored. A loss may be unable to read some variants.
    Where the mean runs over a tensor of the batch, that fits the given targets only, so they stay.
    """
    weight = splitter.objective.weight
    if weight in batch and weight not in COUNTED:
        yield _choose_uneven(weight, batch)
        return
    few = {name: tensor[_choose_rows(len(tensor))].clone() for name, tensor in batch.items()}
    random = torch.Generator().manual_seed(1)
    numbers = _find_integers(splitter, few)
    classes = {n: _draw_classes(few[n], int(batch[n].max()), random) for n in numbers}
    scaled = {n: _scale(few[n]) for n in _find_floats(splitter, few)}
    shorter = {n: _shorten(few[n]) for n in few if n == _MASK}
    named = [n for n in numbers if ignoring and _may_be_ignored(splitter, n, batch[n])]
    ignored = {n: _ignore_some(classes[n], batch[n], k, random) for k, n in enumerate(named)}
    kept = {n: _ignore_some(few[n], batch[n], k, random) for k, n in enumerate(named)}
    beyond = {n: _put_beyond(ignored.get(n, classes[n]), splitter, few) for n in numbers}
    yield {**few, **scaled, **shorter, **classes, **ignored, **beyond}
    yield {**few, **scaled, **shorter, **classes, **ignored}
    yield {**few, **classes, **ignored}
    yield {**few, **scaled, **kept}
    yield {**few, **kept}
    yield {**few, **classes}
    yield {**few, **scaled}
    yield few


def _choose_rows(examples: int) -> Tensor:
    """Choose the first rows, over and over if there are too few."""
    return torch.arange(_TRIED) % examples


def _choose_uneven(weight: str, batch: Batch) -> dict[str, Tensor]:
    """Choose examples from the lightest to the heaviest; make equal weights differ."""
    by_example = batch[weight].reshape(len(batch[weight]), -1).double().sum(1)
    order = by_example.argsort()
    chosen = order[torch.linspace(0, len(order) - 1, _TRIED).round().long()]
    few = {name: tensor[chosen].clone() for name, tensor in batch.items()}
    if float(by_example.max()) <= _UNEVEN * float(by_example.min()):
        few[weight] = _scale(few[weight])
    return few


def _find_integers(splitter: AnySplitter, batch: Batch) -> tuple[str, ...]:
    kinds = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    targets = (name for name in splitter.targets_of(batch) if not name.endswith("mask"))
    return tuple(name for name in targets if batch[name].dtype in kinds)


def _find_floats(splitter: AnySplitter, batch: Batch) -> tuple[str, ...]:
    return tuple(name for name in splitter.targets_of(batch) if batch[name].is_floating_point())


def _may_be_ignored(splitter: AnySplitter, name: str, values: Tensor) -> bool:
    """Return whether a loss may skip some of these numbers: the library's own losses do."""
    known = name in LABEL_NAMES or splitter.objective.loss is None
    tried = splitter.objective.weight in COUNTED
    return (known and tried) or bool((values < 0).any())


def _draw_classes(values: Tensor, largest: int, random: torch.Generator) -> Tensor:
    """Draw other classes of those that occur in the batch, of which there are two or more.

    Each text gets one at its beginning, where many have a label to ignore: some losses do not read
    that place.
    """
    drawn = torch.randint(0, max(largest, 1) + 1, values.shape, generator=random)
    drawn.view(_TRIED, -1)[:, 0] = torch.arange(_TRIED) % (max(largest, 1) + 1)
    kept = values >= 0
    if values.dim() > 1:
        kept[:, 0] = True
    return drawn.to(values.dtype).where(kept, values)


def _ignore_some(values: Tensor, given: Tensor, number: int, random: torch.Generator) -> Tensor:
    """Mark some labels as ignored: other shares in each part, and in each tensor by ``number``."""
    lowest = int(given.min())
    left_out = torch.rand(values.shape, generator=random) < 0.4
    flat = left_out.view(_TRIED, -1)
    none_left = _NONE_LEFT[number % len(_NONE_LEFT)]
    flat[:none_left], flat[none_left:, 0], flat[-1] = True, False, False
    return values.masked_fill(left_out, lowest if lowest < 0 else IGNORED_LABEL)


def _put_beyond(values: Tensor, splitter: AnySplitter, batch: Batch) -> Tensor:
    """Move one position beyond the end of the text, which question answering leaves out."""
    inputs = set(batch).difference(splitter.targets_of(batch))
    lengths = [batch[name].shape[1] for name in inputs if batch[name].dim() > 1]
    found = values.clone()
    if lengths and values.dim() == 1:
        found[1] = max(lengths)
    return found


def _scale(values: Tensor) -> Tensor:
    factors = torch.tensor(_FACTORS, dtype=values.dtype)
    return values * factors.view(-1, *(1,) * (values.dim() - 1))


def _shorten(mask: Tensor) -> Tensor:
    """Let the examples end one after the other."""
    places, length = torch.arange(mask.shape[-1]), mask.shape[-1]
    ends = torch.linspace(length, max(length // 3, 1), _TRIED).round()
    return mask * (places < ends.view(-1, *(1,) * (mask.dim() - 1))).to(mask.dtype)
