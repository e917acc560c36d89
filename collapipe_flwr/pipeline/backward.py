"""A backward pass whose first result is the gradient of the input.

Nobody waits for the gradients of weights before the optimiser does, but the stage ahead waits for
that of its output. So matrices are left out of the pass, and what they need is noted on its way;
their own gradients follow when the first one has been sent. The same operators run on the same
numbers, so every gradient is that of a pass in one piece, bit for bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

_MATRIX = 2  # dimensions from which on a weight's gradient is worth being computed apart
_Users = Mapping[Node, Sequence[Node]]  # of what a node makes gradients for


@dataclass(slots=True)
class _Owed:
    """Weights whose gradients follow from those that arrive at ``node``."""

    node: Node
    weights: list[Tensor]
    arrived: tuple[Tensor | None, ...] = ()

    def note(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Called by autograd when it comes to the node."""
        self.arrived = gradients

    def pay(self) -> None:
        """Compute and accumulate the gradients of the weights."""
        found = [
            (GradientEdge(self.node, i), g) for i, g in enumerate(self.arrived) if g is not None
        ]
        self.arrived = ()
        if found:
            edges, gradients = zip(*found, strict=True)
            torch.autograd.backward(edges, gradients, inputs=self.weights)


class Remainder:
    """The part of a backward pass that nobody waits for; to be finished once."""

    def __init__(self, owed: Sequence[_Owed]) -> None:
        self._owed = owed

    @property
    def tensors(self) -> list[Tensor]:
        """What is kept alive until then, apart from the graph."""
        return [g for owed in self._owed for g in owed.arrived if g is not None]

    def finish(self) -> None:
        """Accumulate the gradients that are still missing."""
        for owed in self._owed:
            owed.pay()


def input_first(end: GradientEdge, gradient: Tensor | None, hidden: Tensor) -> Remainder:
    """Accumulate the gradients of ``hidden`` and of all that is no matrix of one use.

    ``end`` is where the graph ends and ``gradient`` the one there (None: of a scalar, 1).
    """
    users, leaves = _explored(end.node)
    way = _above(users, [node for node, leaf in leaves.items() if leaf is hidden])
    owed: dict[Node, _Owed] = {}
    at_once: list[Tensor] = []
    for node, leaf in leaves.items():
        uses = _first_on(way, users, node) if leaf.dim() >= _MATRIX and node not in way else []
        if len(uses) == 1:
            owed.setdefault(uses[0], _Owed(uses[0], [])).weights.append(leaf)
        else:
            at_once.append(leaf)
    _accumulate(end, gradient, at_once, owed.values())
    return Remainder(list(owed.values()))


def _accumulate(
    end: GradientEdge, gradient: Tensor | None, leaves: Sequence[Tensor], owed: Iterable[_Owed]
) -> None:
    hooks = [o.node.register_prehook(o.note) for o in owed]
    try:
        torch.autograd.backward(end, gradient, retain_graph=True, inputs=leaves)
    finally:
        for hook in hooks:
            hook.remove()


def _explored(root: Node) -> tuple[_Users, dict[Node, Tensor]]:
    """All nodes behind ``root`` with those that use them, and the leaves among them."""
    users: defaultdict[Node, list[Node]] = defaultdict(list)
    leaves: dict[Node, Tensor] = {}
    open_ends, seen = [root], {root}
    while open_ends:
        user = open_ends.pop()
        for node, _ in user.next_functions:
            if node is None:
                continue
            users[node].append(user)
            if node not in seen:
                seen.add(node)
                open_ends.append(node)
                if (leaf := getattr(node, "variable", None)) is not None:
                    leaves[node] = leaf
    return users, leaves


def _above(users: _Users, nodes: Iterable[Node]) -> set[Node]:
    """The nodes and all whose gradients lead to theirs."""
    found = set(nodes)
    open_ends = list(found)
    while open_ends:
        for user in users.get(open_ends.pop(), ()):
            if user not in found:
                found.add(user)
                open_ends.append(user)
    return found


def _first_on(way: set[Node], users: _Users, node: Node) -> list[Node]:
    """The nodes of ``way`` that are met first on all paths up from ``node``."""
    met: dict[Node, None] = {}
    open_ends, seen = [node], {node}
    while open_ends:
        for user in users.get(open_ends.pop(), ()):
            if user in way:
                met[user] = None
            elif user not in seen:
                seen.add(user)
                open_ends.append(user)
    return list(met)
