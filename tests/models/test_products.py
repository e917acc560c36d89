"""Law: products of adapters keep their mean whatever the ranks, and factors are the nearest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.lora import list_adapters
from collapipe_flwr.models.products import Adapter, Bases, factorize, multiply

ADAPTER = Adapter(a="a", b="b", scale=2.0)
TABLE = Adapter(a="a", b="b", scale=0.5, on_table=True)


def draw(rank: int, out: int = 7, inside: int = 9, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * seed + rank)
    a, b = (torch.randn(size, generator=random) for size in ((rank, inside), (out, rank)))
    return a.double(), b.double()


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), atol=1e-5)


@pytest.mark.parametrize("adapter", [ADAPTER, TABLE])
@pytest.mark.parametrize("ranks", [(2, 2), (1, 2, 4), (3, 8)])
def test_the_mean_of_cores_is_that_of_products(adapter: Adapter, ranks: tuple[int, ...]) -> None:
    models = [draw(rank, seed=n) for n, rank in enumerate(ranks)]
    bases = Bases.of(models)
    shares = [(n + 1.0) / sum(range(1, len(models) + 1)) for n in range(len(models))]
    scales = [adapter.scale / rank for rank in ranks]
    core = sum(
        share * bases.core_of(model, scale)
        for model, share, scale in zip(models, shares, scales, strict=True)
    )
    mean = sum(
        share * scale * b @ a for (a, b), share, scale in zip(models, shares, scales, strict=True)
    )
    assert isinstance(core, Tensor) and isinstance(mean, Tensor)
    values = torch.linalg.svdvals(mean)
    for rank in (1, 3, 7, 10):
        found, lost = factorize(core, bases, adapter, draw(rank))
        whole, whole_lost = factorize(mean, None, adapter, draw(rank))
        product = multiply(found, adapter.scale)
        assert close(product, multiply(whole, adapter.scale))
        assert lost == pytest.approx(whole_lost, abs=1e-9)
        assert lost == pytest.approx(float(values[rank:].square().sum()), abs=1e-9)
        distance = float((product.double() - mean).square().sum())
        assert distance == pytest.approx(lost, abs=1e-6)  # as near as any of that rank
        if rank >= sum(ranks):
            assert close(product, mean)


def test_factors_of_nothing_can_still_learn() -> None:
    a, b = draw(4)
    bases = Bases.of([(a, 0 * b)])
    (a, b), lost = factorize(bases.core_of((a, 0 * b), 2.0), bases, ADAPTER, draw(3))
    assert lost == 0 and not b.any()
    assert close(a @ a.T, torch.eye(3) / 3)  # rows as long as drawn ones
    a, b = draw(4)
    bases = Bases.of([(0 * a, b)])
    (a, b), _ = factorize(bases.core_of((0 * a, b), 2.0), bases, TABLE, draw(3))
    assert not a.any() and close(b.T @ b, 7 * torch.eye(3))


def test_factors_do_not_depend_on_the_signs_of_a_decomposition() -> None:
    (a, b), (like_a, like_b) = draw(3), draw(3)
    found = []
    for signs in (torch.ones(3), torch.tensor([1.0, -1.0, -1.0])):
        turned = (signs[:, None] * a, b * signs)
        bases = Bases.of([turned])
        found.append(factorize(bases.core_of(turned, 1.0), bases, ADAPTER, (like_a, like_b))[0])
    for one, other in zip(*found, strict=True):
        assert close(one, other)


def test_biases_beside_factors_have_no_part_in_products() -> None:
    from peft import LoraConfig, get_peft_model  # slow; other workers do without

    lora = LoraConfig(r=2, lora_alpha=8, target_modules=["0"], lora_bias=True)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), lora)
    with pytest.raises(ModelError, match="lora_bias adds to the product"):
        list_adapters(model)
