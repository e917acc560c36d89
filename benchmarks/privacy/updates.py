"""What gradients tell of labels, and updates of their examples: words, and who is a member.

Gradients are those that devices see, updates those that the server does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.privacy.recording import Recording
from benchmarks.privacy.study import SEED, Batch
from benchmarks.privacy.tokens import share
from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.models.splitter import Splitter

ADAPTER = "lora_B"  # a module whose output is all that an adapter adds


@dataclass(frozen=True)
class Labels:
    """The share of labels read, by depth, from gradients and from hidden states; and controls."""

    gradients: dict[int, float]
    hidden: dict[int, float]
    controls: dict[str, float]
    examples: int  # whose labels were to be read
    commonest: float  # the share of their most frequent label


def attack_labels(seen: Recording) -> Labels:
    """Whoever knows the labels of the first half of the steps names those of the other half.

    A label's gradients, and hidden states, are taken to be like the mean of the known ones. Labels
    that are not among those are left out.
    """
    labels = torch.cat([batch["labels"] for batch in seen.batches])
    masks = [batch["attention_mask"].bool() for batch in seen.batches]
    known = sum(len(batch["labels"]) for batch in seen.batches[: len(seen.batches) // 2])

    def sums(states: Sequence[Tensor]) -> Tensor:
        pairs = zip(states, masks, strict=True)
        return torch.cat([(state * mask[..., None]).sum(1) for state, mask in pairs])

    met = torch.isin(labels[known:], labels[:known])

    def rate(found: Tensor, taught: Tensor) -> float:
        return share(_nearest_class(found, taught, known)[met], labels[known:][met])

    gradients = {depth: sums(states) for depth, states in seen.gradients.items()}
    first = gradients[min(gradients)]
    planted = functional.one_hot(labels) * (10 * first.norm(dim=1, keepdim=True))
    order = torch.randperm(known, generator=torch.Generator().manual_seed(SEED))
    shuffled = torch.cat([labels[:known][order], labels[known:]])
    victims = labels[known:][met]
    return Labels(
        gradients={depth: rate(each, labels) for depth, each in gradients.items()},
        hidden={depth: rate(sums(states), labels) for depth, states in seen.hidden.items()},
        controls={
            "planted": rate(torch.cat([first, planted], 1), labels),
            "shuffled": rate(gradients[max(gradients)], shuffled),
        },
        examples=len(victims),
        commonest=float(victims.bincount().max() / len(victims)),
    )


def _nearest_class(found: Tensor, labels: Tensor, known: int) -> Tensor:
    rows = functional.normalize(found, dim=1)
    means = torch.zeros(int(labels.max()) + 1, rows.shape[1])
    means.index_add_(0, labels[:known], rows[:known])
    return (rows[known:] @ functional.normalize(means, dim=1).T).argmax(1)


def read_next_tokens(splitter: Splitter, seen: Recording) -> Labels:
    """The labels of a language model, its next tokens, by the last link and the known head.

    The gradient of a logit is that of its row of the head, through the norm before it.
    """
    model: Any = splitter.build_whole(seen.before)
    rows = model.get_output_embeddings().weight.detach() * model.get_decoder().norm.weight.detach()
    rows = functional.normalize(rows, dim=1)
    depth = max(seen.gradients)
    found, wanted = [], []
    for batch, gradient in zip(seen.batches, seen.gradients[depth], strict=True):
        following = batch["labels"][:, 1:]
        mask = following != IGNORED_LABEL
        found.append(gradient[:, :-1][mask])
        wanted.append(following[mask])
    states, labels = torch.cat(found), torch.cat(wanted)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    named = torch.cat([(some @ rows.T).argmin(1) for some in torch.split(states, 256)])
    planted = torch.cat([(some @ rows.T).argmin(1) for some in torch.split(-rows[labels], 256)])
    counts = labels.bincount()
    return Labels(
        gradients={depth: share(named, labels)},
        hidden={},
        controls={"planted": share(planted, labels), "shuffled": share(named, labels[order])},
        examples=len(labels),
        commonest=float(counts.max() / len(labels)),
    )


@dataclass(frozen=True)
class Update:
    """What the server reads in one cluster's update; areas under ROC curves, 0.5: nothing.

    ``words``: tokens that members alone have, against those that others alone have. ``same_label``
    compares members with others of the same label; of ``label_alone`` every example scores as its
    label does.
    """

    words: float
    members: float
    same_label: float
    label_alone: float | None
    controls: dict[str, float]
    pairs: int  # of a member and another with the same label
    deviations: dict[str, float]  # of an area by chance


def attack_update(
    splitter: Splitter, seen: Recording, others: Sequence[Batch], content: Sequence[Tensor]
) -> Update:
    """Compare members' batches with those of others; ``content`` are the users' tokens of both."""
    losses = [_losses(splitter, seen.before, seen.batches), _losses(splitter, seen.before, others)]
    later = [_losses(splitter, seen.after, seen.batches), _losses(splitter, seen.after, others)]
    inside, outside = (before - after for before, after in zip(losses, later, strict=True))
    classes = seen.batches[0]["labels"].dim() == 1
    same = torch.ones(len(inside), len(outside), dtype=torch.bool)
    alone = None
    if classes:
        labels = [torch.cat([b["labels"] for b in each]) for each in (seen.batches, others)]
        same = labels[0][:, None] == labels[1]
        alone = _area_of_labels(labels, outside)
    ours, theirs = _own_tokens(seen.batches, others, content)
    scores = _word_scores(splitter, seen, torch.cat([ours, theirs]))
    shuffled = torch.randperm(len(scores), generator=torch.Generator().manual_seed(SEED))
    everyone = torch.cat([inside, outside])
    mixed = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(SEED))
    drawn = everyone[mixed]
    return Update(
        words=area(scores[: len(ours)], scores[len(ours) :]),
        members=area(inside, outside),
        same_label=area(inside, outside, same),
        label_alone=alone,
        controls={
            "planted members": area(inside + 1e3, outside, same),
            "shuffled members": area(drawn[: len(inside)], drawn[len(inside) :]),
            "shuffled words": area(scores[shuffled][: len(ours)], scores[shuffled][len(ours) :]),
        },
        pairs=int(same.sum()),
        deviations={
            "words": _deviation(torch.ones(len(ours), len(theirs))),
            "members": _deviation(torch.ones(same.shape)),
            "same label": _deviation(same),
        },
    )


def area(higher: Tensor, lower: Tensor, pairs: Tensor | None = None) -> float:
    """How often one of ``higher`` (M,) exceeds one of ``lower`` (N,), ties half; of some (M, N)."""
    difference = higher[:, None] - lower
    won = (difference > 0).double() + (difference == 0).double() / 2
    return float(won.mean() if pairs is None else won[pairs].mean())


def _deviation(pairs: Tensor) -> float:
    """The standard deviation by chance of an area over pairs (M, N) of the same group.

    That of a group with m and n of either kind is by Mann and Whitney (1947).
    """
    ours, theirs = pairs.sum(1).double(), pairs.sum(0).double()  # n for each m, m for each n
    count = float(pairs.sum())
    return math.sqrt(float(ours.square().sum() + theirs.square().sum()) + count) / (
        math.sqrt(12) * count
    )


def _area_of_labels(labels: Sequence[Tensor], outside: Tensor) -> float:
    """Membership by the label alone: how much the loss of others with this label fell."""
    count = int(max(each.max() for each in labels)) + 1
    sums = torch.zeros(count).index_add_(0, labels[1], outside)
    means = sums / labels[1].bincount(minlength=count).clamp(min=1)
    return area(means[labels[0]], means[labels[1]])


@torch.no_grad()
def _losses(splitter: Splitter, weights: Mapping[str, Tensor], batches: Sequence[Batch]) -> Tensor:
    """The loss of each example (N,)."""
    model, found = splitter.build_whole(weights), []
    for batch in batches:
        logits = splitter.run_whole(model, splitter.context(batch) | batch).logits
        labels = batch["labels"]
        if labels.dim() == 1:
            found.append(functional.cross_entropy(logits, labels, reduction="none"))
            continue
        wanted = labels[:, 1:]
        each = functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), wanted, reduction="none", ignore_index=IGNORED_LABEL
        )
        found.append(each.sum(1) / (wanted != IGNORED_LABEL).sum(1))
    return torch.cat(found)


def _own_tokens(
    members: Sequence[Batch], others: Sequence[Batch], content: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Tokens that one side has and the other has not."""
    batches = [*members, *others]
    ids = [batch["input_ids"][mask] for batch, mask in zip(batches, content, strict=True)]
    ours, theirs = (
        torch.unique(torch.cat(each)) for each in (ids[: len(members)], ids[len(members) :])
    )
    return ours[~torch.isin(ours, theirs)], theirs[~torch.isin(theirs, ours)]


def _word_scores(splitter: Splitter, seen: Recording, tokens: Tensor) -> Tensor:
    """How much the update is about each token (N,).

    In full training that is how far its embedding moved. Adapters of the first block answer their
    own examples' inputs most: it is the energy that they add where the token is the only one.
    """
    if splitter.spec.lora is None:
        before, after = (
            _table(splitter.build_whole(weights)) for weights in (seen.before, seen.after)
        )
        return (after - before)[tokens].square().sum(1)
    embedding, segment = (
        splitter.build_embedding(seen.after),
        splitter.build_segment(0, 1, seen.after),
    )
    energy: list[Tensor] = []

    def add(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        energy.append(output.square().sum((1, 2)))

    batch = {"input_ids": tokens[:, None], "attention_mask": torch.ones_like(tokens)[:, None]}
    with ExitStack() as hooks, torch.no_grad():
        for module in _adapters(segment):
            hooks.enter_context(module.register_forward_hook(add))
        segment(*splitter.embed(embedding, seen.after, batch))
    return torch.stack(energy).sum(0)


def _table(model: Any) -> Tensor:
    table: Tensor = model.get_input_embeddings().weight
    return table.detach()


def _adapters(segment: nn.Module) -> Iterator[nn.Module]:
    for name, module in segment.named_modules():
        if name.rpartition(".")[0].endswith(ADAPTER):
            yield module
