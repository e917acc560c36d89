"""Adapters aggregated as products, whatever the ranks of the clusters (`models.products`).

Every cluster is sent the global adapters in factors of its own rank. What it replies is shown to
the inner strategy as products, one array in the place of two, and what the strategy makes of them
becomes factors of the global rank again, the nearest if its rank is larger.

FedAvg and FedProx, or what inherits their ``aggregate_train``, get the cores of products in bases
of the round: the weighted mean of cores is that of products. Other strategies compare arrays entry
by entry or with those of earlier rounds, for which bases must not change, and get whole products,
as large as the matrices that are adapted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy

from collapipe_flwr.core.errors import ConfigError, RunError
from collapipe_flwr.federation import records
from collapipe_flwr.federation.arrays import decode_tensor, encode_tensor
from collapipe_flwr.federation.inner import CLIPPED_BY_CLIENTS, layers
from collapipe_flwr.models.any_splitter import DescribedModel
from collapipe_flwr.models.products import Adapter, Bases, Factors, factorize, multiply
from collapipe_flwr.models.spec import PRODUCTS, ModelSpec
from collapipe_flwr.models.splitter import splitter_of

MOST_BYTES = 2**31  # of the whole products of a model: the inner strategy may keep several models


def with_rank(model: DescribedModel, rank: int, cluster_id: str) -> DescribedModel:
    """Return the model with adapters of a cluster's rank, 0 being the model's own.

    Raises ConfigError for a rank that cannot be aggregated.
    """
    spec = model.splitter.spec
    most = spec.rank if isinstance(spec, ModelSpec) else 0
    if not (rank and most) or rank == most:
        return model
    assert isinstance(spec, ModelSpec)
    check_rank(rank, most, model.aggregate, cluster_id)
    return DescribedModel(splitter_of(spec.with_rank(rank).to_json()), model.shape)


def check_rank(rank: int, most: int, aggregate: str, cluster_id: str) -> None:
    """Raise ConfigError for a cluster's rank that cannot be aggregated; 0 stands for none."""
    if rank > most > 0:
        raise ConfigError(
            f"cluster {cluster_id}: lora-rank is {rank}, but the global adapters have rank {most}: "
            f"set it to {most} at most, or raise lora.rank (r in LoraConfig)"
        )
    if rank not in (0, most) and most and aggregate != PRODUCTS:
        raise ConfigError(
            f"cluster {cluster_id}: lora-rank is {rank}, and factors of other ranks than {most} "
            "have no mean: set lora.aggregate=products (SplitModel(..., aggregate='products')), or "
            "leave lora-rank out"
        )


def convert(arrays: ArrayRecord, ours: DescribedModel, theirs: DescribedModel) -> ArrayRecord:
    """Return the arrays of our model with its adapters in factors of their rank."""
    if ours.splitter is theirs.splitter:
        return arrays
    changed, prefix = ArrayRecord(dict(arrays)), ours.splitter.prefix
    for adapter, other in zip(ours.adapters, theirs.adapters, strict=True):
        sizes = [theirs.splitter.shapes[key.removeprefix(prefix)] for key in (other.a, other.b)]
        factors = _factors(arrays, adapter)
        if sizes[0][0] == factors[0].shape:
            continue
        bases = Bases.of([factors])
        core = bases.core_of(factors, adapter.scale)
        a, b = (factor.new_empty(size) for factor, (size, _) in zip(factors, sizes, strict=True))
        (a, b), _ = factorize(core, bases, other, (a, b))
        changed[adapter.a], changed[adapter.b] = encode_tensor(a), encode_tensor(b)
    return changed


def shows_cores(inner: Strategy) -> bool:
    """Return whether a strategy's arrays are weighted means of replies, in any bases."""
    return type(inner).aggregate_train is FedAvg.aggregate_train


def check_products(
    model: DescribedModel, inner: Strategy, *, keeps_optimizer: bool, joins_late: bool
) -> None:
    """Raise RunError for what products cannot be aggregated beside, or by."""
    unfit = {
        "the optimizer's state of earlier rounds (train.optimizer-state, keep_optimizer)": (
            keeps_optimizer
        ),
        "updates of earlier rounds (round-late, late='join')": joins_late,
    }
    for what, asked in unfit.items():
        if asked:
            raise RunError(
                f"{what} cannot be kept beside lora.aggregate=products, which factors adapters "
                "anew in every round: leave it out, or set lora.aggregate=factors"
            )
    if any(isinstance(layer, CLIPPED_BY_CLIENTS) for layer in layers(inner)):
        raise RunError(
            f"{type(inner).__name__} relies on updates that clients clip, and products of adapters "
            "have other norms: set lora.aggregate=factors, or clip on the server's side"
        )
    if shows_cores(inner):
        return
    shapes, prefix = model.splitter.shapes, model.splitter.prefix
    sides = ((shapes[key.removeprefix(prefix)][0] for key in (x.a, x.b)) for x in model.adapters)
    size = sum(4 * a[1:].numel() * b.numel() // b[1] for a, b in sides)
    if size > MOST_BYTES:
        raise RunError(
            f"{type(inner).__name__} needs the whole products of all adapters, "
            f"{size / 2**30:.1f} GiB for each cluster, and {MOST_BYTES / 2**30:g} GiB at most can "
            "be aggregated: use FedAvg or FedProx, or set lora.aggregate=factors"
        )


def show_model(arrays: ArrayRecord, model: DescribedModel | None, inner: Strategy) -> ArrayRecord:
    """Return the global model as the inner strategy compares it with replies."""
    if model is None or model.aggregate != PRODUCTS or shows_cores(inner):
        return arrays
    return ShownProducts.of(model, (), whole=True).show(arrays, model)


def restore_factors(
    messages: Iterable[Message], shown: ArrayRecord, view: ArrayRecord
) -> list[Message]:
    """Return messages with the model as factors, ``view``, where they have it as ``shown``.

    Raises RunError where the strategy changed the model: nobody knows what it meant.
    """
    if shown.keys() == view.keys():
        return list(messages)
    return [records.replace_content(m, _with_factors(m.content, shown, view)) for m in messages]


def _with_factors(content: RecordDict, shown: ArrayRecord, view: ArrayRecord) -> RecordDict:
    changed = RecordDict(dict(content))
    for name, record in content.array_records.items():
        if record.keys() != shown.keys():
            continue
        if any(record[key].data != array.data for key, array in shown.items()):
            raise RunError(
                "the strategy changes the model that it sends, which products of adapters do not "
                "allow: set lora.aggregate=factors"
            )
        changed[name] = view.copy()
    return changed


@dataclass(frozen=True, slots=True)
class ShownProducts:
    """How one round shows adapters as products; ``bases`` by key of B, None for whole ones."""

    model: DescribedModel
    bases: Mapping[str, Bases | None]
    whole: bool

    @staticmethod
    def of(model: DescribedModel, models: Collection[ArrayRecord], *, whole: bool) -> ShownProducts:
        """Find bases for these models, unless they are to be shown ``whole``."""
        found: dict[str, Bases | None] = {adapter.b: None for adapter in model.adapters}
        for adapter in () if whole else model.adapters:
            found[adapter.b] = Bases.of([_factors(arrays, adapter) for arrays in models])
        return ShownProducts(model, found, whole)

    def show(self, arrays: ArrayRecord, model: DescribedModel) -> ArrayRecord:
        """Return the arrays of ``model``, of any rank, with products in the places of B."""
        shown = ArrayRecord(dict(arrays))
        for adapter in model.adapters:
            factors, bases = _factors(arrays, adapter), self.bases[adapter.b]
            del shown[adapter.a]
            if bases is None:
                shown[adapter.b] = encode_tensor(multiply(factors, adapter.scale))
            else:
                shown[adapter.b] = encode_tensor(bases.core_of(factors, adapter.scale))
        return shown

    def factorize(self, shown: ArrayRecord, like: ArrayRecord) -> tuple[ArrayRecord, float]:
        """Return ``shown`` in factors with the shapes of ``like``, and the relative error."""
        pairs: dict[str, Array] = {}
        lost = whole = 0.0
        for adapter in self.model.adapters:
            product = decode_tensor(adapter.b, shown[adapter.b]).double()
            (a, b), missed = factorize(
                product, self.bases[adapter.b], adapter, _factors(like, adapter)
            )
            pairs |= {adapter.a: encode_tensor(a), adapter.b: encode_tensor(b)}
            lost, whole = lost + missed, whole + float(product.square().sum())
        found = ArrayRecord({key: pairs.get(key, shown.get(key, like[key])) for key in like})
        return found, (lost / whole) ** 0.5 if whole else 0.0


def _factors(arrays: ArrayRecord, adapter: Adapter) -> Factors:
    return decode_tensor(adapter.a, arrays[adapter.a]), decode_tensor(adapter.b, arrays[adapter.b])
