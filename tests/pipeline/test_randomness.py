"""Laws of seeded dropout: every use of a layer has a mask of its own, and no cut changes it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from collapipe_flwr.models.random_functions import RANDOM
from collapipe_flwr.pipeline.randomness import SeededRandomness

WIDTH = 64


class Sandwich(nn.Module):
    """A block that drops out by one layer, which it calls three times."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.dropout(self.norm(self.dropout(hidden)))
        return self.dropout(self.norm(hidden))


class Net(nn.Module):
    """Blocks between two uses of one dropout layer; the second block runs its inner layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.blocks = nn.ModuleList([Sandwich(), nn.Sequential(Sandwich()), Sandwich()])
        self.last = nn.LayerNorm(WIDTH)

    def embed(self, given: Tensor) -> Tensor:
        return self.dropout(self.table(given))

    def run(self, index: int, hidden: Tensor) -> Tensor:
        return self.blocks[index](hidden)

    def end(self, hidden: Tensor) -> Tensor:
        return self.dropout(self.last(hidden))

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.embed(given)
        for index in range(len(self.blocks)):
            hidden = self.run(index, hidden)
        return self.end(hidden)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def masks_of(layer: nn.Module) -> list[Tensor]:
    """Which elements each call of the layer leaves, filled as it is called."""
    found: list[Tensor] = []
    layer.register_forward_hook(lambda *call: found.append(call[-1] != 0))
    return found


def test_masks_depend_on_seed_step_micro_batch_and_layer() -> None:
    root = nn.ModuleDict({"a": nn.Dropout(0.5), "b": nn.Dropout(0.5)})
    ones = torch.ones(WIDTH)

    def masks(*place: int) -> tuple[tuple[float, ...], ...]:
        with SeededRandomness(root, place[0]).seed_at(*place[1:]):
            return tuple(tuple(root[name](ones).tolist()) for name in ("a", "b"))

    assert masks(1, 2, 3) == masks(1, 2, 3)
    places = [masks(*place) for place in ((1, 2, 3), (4, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert len({mask for two in places for mask in two}) == 8


def test_every_call_of_a_layer_has_a_mask_of_its_own(net: Net) -> None:
    found = [masks_of(layer) for layer in (net.dropout, net.blocks[0].dropout)]
    with SeededRandomness(net, 1).seed_at(0, 0):
        net(torch.ones(2, WIDTH))
    masks = [tuple(mask.flatten().tolist()) for calls in found for mask in calls]
    assert len(masks) == len(set(masks)) == 5


def test_a_layer_that_is_not_the_blocks_own_has_a_mask_in_each(net: Net) -> None:
    """And so has one within a layer that the block calls twice."""
    shared, inner = net.dropout, Sandwich()
    net.inner = inner

    class Caller(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return shared(inner(inner(hidden)))

    net.blocks = nn.ModuleList([Caller(), Caller()])
    found = [masks_of(shared), masks_of(inner.dropout)]
    with SeededRandomness(net, 1).seed_at(0, 0):
        net(torch.ones(2, WIDTH))
    masks = [tuple(mask.flatten().tolist()) for calls in found for mask in calls]
    assert len(masks) == len(set(masks)) == 4 + 12


@pytest.mark.parametrize("cut", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_no_cut_changes_a_mask(net: Net, cut: tuple[int, ...]) -> None:
    given = torch.randn(2, WIDTH)
    seeded = SeededRandomness(net, 1)
    with seeded.seed_at(4, 2):
        whole = net(given)
    with seeded.seed_at(4, 2):
        hidden = net.embed(given)
    first = 0
    for size in cut:
        with seeded.seed_at(4, 2):
            for index in range(first, first + size):
                hidden = net.run(index, hidden)
        first += size
    with seeded.seed_at(4, 2):
        assert torch.equal(net.end(hidden), whole)


def test_a_block_that_is_computed_again_draws_the_same_masks(net: Net) -> None:
    given, seeded = torch.randn(2, WIDTH), SeededRandomness(net, 1)
    with seeded.seed_at(0, 0):
        first = net.run(0, given)
        second = net.run(1, first)
    with seeded.seed_at(0, 0):
        assert torch.equal(net.run(1, first), second)
    with seeded.seed_at(0, 1):
        assert not torch.equal(net.run(1, first), second)


def test_a_call_that_is_left_by_an_exception_has_ended(net: Net) -> None:
    """As parts leave the library's forward when their last block is done."""

    def leave(*_: object) -> None:
        raise StopIteration

    hidden, seeded = torch.ones(2, WIDTH), SeededRandomness(net, 1)
    with seeded.seed_at(0, 0):
        expected = net.end(hidden)
    net.blocks[0].register_forward_hook(leave)
    with seeded.seed_at(0, 0):
        with pytest.raises(StopIteration):
            net.run(0, hidden)
        assert torch.equal(net.end(hidden), expected)


def test_seeding_leaves_the_generator_of_the_process_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with SeededRandomness(nn.Dropout(0.5), 1).seed_at(0, 0):
        nn.functional.dropout(torch.ones(9))
    assert torch.equal(torch.rand(4), expected)


class Applied(nn.Module):
    """A layer that is one function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


class Recurrent(nn.LSTM):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, num_layers=2, dropout=0.5)

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden)[0]


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "noise": lambda: Applied(lambda h: h + torch.randn_like(h)),
    "noise of a shape": lambda: Applied(lambda h: h + torch.randn(h.shape)),
    "in place": lambda: Applied(lambda h: torch.empty_like(h).normal_() * h),
    "normal": lambda: Applied(lambda h: torch.normal(h, 1.0)),
    "numbers": lambda: Applied(lambda h: h + torch.randint(9, h.shape)),
    "order": lambda: Applied(lambda h: h[:, torch.randperm(WIDTH)]),
    "choice": lambda: Applied(lambda h: torch.multinomial(h.softmax(-1), 9).float()),
    "gumbel": lambda: Applied(functional.gumbel_softmax),
    "rectifier": nn.RReLU,
    "pool": lambda: nn.FractionalMaxPool2d(1, output_ratio=0.5),
    "distribution": lambda: Applied(lambda h: distributions.Gamma(h.exp(), h.exp()).sample()),
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("make", DRAWING.values(), ids=DRAWING)
def test_whatever_draws_draws_the_same_again(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    layer, hidden = make().train(), torch.randn(WIDTH, WIDTH)
    given = hidden[None] if isinstance(layer, nn.FractionalMaxPool2d) else hidden
    seeded = SeededRandomness(layer, 1)

    def drawn(micro_batch: int) -> Tensor:
        with seeded.seed_at(0, micro_batch):
            return layer(given)

    first = drawn(0)
    assert torch.equal(drawn(0), first)
    assert not torch.equal(drawn(1), first)


def test_no_function_of_torch_that_draws_is_forgotten() -> None:
    """By torch's own tag; names with an underscore are called by others."""
    known = {function.__name__ for function in RANDOM}
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if any(callable(getattr(at, name, None)) for at in (torch, torch.Tensor, functional)):
            *_, tags = torch._C._get_operation_overload(schema.name, schema.overload_name)
            draws = torch.Tag.nondeterministic_seeded in tags and not name.startswith("_")
            assert not draws or name in known | {"miopen_rnn"}
