"""A user's live model, described so that it can be cut and rebuilt on other machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import find_path
from collapipe_flwr.models.any_splitter import AnySplitter, DescribedModel
from collapipe_flwr.models.decomposition import CLOSE, find_means, make_up_batch
from collapipe_flwr.models.describing import describe_live, keep_frozen
from collapipe_flwr.models.foreign_errors import translate_errors
from collapipe_flwr.models.live_models import (
    describe_adapters,
    prove_base,
    refuse_unfit,
    state_of,
    unwrap_model,
)
from collapipe_flwr.models.module_call import list_arguments
from collapipe_flwr.models.module_description import describe_module, take_first_examples
from collapipe_flwr.models.profile import profile_model
from collapipe_flwr.models.skeleton import build_module, make_example_inputs
from collapipe_flwr.models.spec import FACTORS, BatchShape, ModelSpec, ModuleSpec
from collapipe_flwr.models.splitter import Splitter, splitter_of
from collapipe_flwr.models.tasks import LABELS, numbers_of

_log = logging.getLogger("flwr.collapipe")

Loaded = Mapping[str, Any] | tuple[Any, ...] | list[Any]
_UNTRAINED = "the model cannot be trained on the example"
_NOT_APART = "cannot be split: its parts do not run apart from each other"
INPUTS = "inputs"  # and labels: what a batch of two tensors is made of


class SplitModel(DescribedModel):
    """Describes ``model`` for training in parts; raises ModelError with the reason if it cannot be.

    ``model`` is a live model, or what builds one with ``arguments`` (JSON). Of a ``PeftModel`` only
    adapters travel; its base is read where it was loaded from. Models of transformers need
    ``batch_size`` and the ``length`` of the longest texts; other modules an ``example``, which is a
    batch of the user's loader: a mapping of tensors, or inputs and labels.

    ``blocks`` is the path of the list of blocks. ``embed`` and ``head`` name modules or tensors
    that belong before and after it where a trace cannot decide. ``loss(outputs, batch)`` returns
    the mean loss; None is the model's own, or cross entropy. That mean runs over ``weight``:
    "examples", "labels", "shifted-labels" (for a loss that shifts them by one), or the sum of a
    tensor of the batch. If it does not (`decomposition`), or with ``whole_batches``, a batch is one
    micro-batch. ``inputs`` are the tensors of a batch that forward reads. ``personal`` parameters
    (modules or tensors) are never averaged. With ``hold_frozen``, the embedding and the frozen
    blocks behind it stay at the control unit (models of transformers), which may keep their results
    (`LearningSettings.cache`). Of adapters, ``aggregate`` averages
    "factors" or "products", which clusters of several ranks have in common.
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., nn.Module],
        *,
        example: Loaded | None = None,
        batch_size: int | None = None,
        length: int | None = None,
        blocks: str = "",
        embed: Sequence[str] = (),
        head: Sequence[str] = (),
        loss: Callable[[Any, dict[str, Tensor]], Tensor] | str | None = None,
        weight: str = "",
        whole_batches: bool = False,
        inputs: Sequence[str] | None = None,
        arguments: Mapping[str, object] | None = None,
        ties: str = "rows",
        shared: str = "sum",
        edge_blocks: int = 0,
        hold_frozen: bool = False,
        personal: Sequence[str] = (),
        aggregate: str = FACTORS,
    ) -> None:
        if isinstance(model, nn.Module):
            refuse_unfit(model)
        build, given = _find_builder(model, arguments)
        if isinstance(model, nn.Module):
            self.model = model
        else:
            self.model = build_module(find_path(build, "the model"), given)
            refuse_unfit(self.model)
        self._example = None if example is None else as_batch(example)
        if loss is not None and not isinstance(loss, str):
            loss = find_path(loss, "the loss")
        common: dict[str, Any] = {"loss": loss or "", "weight": weight, "edge_blocks": edge_blocks}
        inner = unwrap_model(self.model)
        if isinstance(inner, PreTrainedModel):
            spec: ModelSpec | ModuleSpec
            adapters = describe_adapters(self.model)
            spec = describe_live(inner, ties=ties, shared=shared, **adapters, **common)
            if adapters:
                spec = prove_base(spec, self.model)
            if hold_frozen:
                spec = keep_frozen(spec)
        else:
            spec = describe_module(
                self.model,
                example=self._require_example(),
                build=find_path(build, "the model"),
                arguments_json=given,
                blocks=blocks,
                embed=embed,
                head=head,
                inputs=self._find_inputs() if inputs is None else tuple(inputs),
                **common,
            )
        super().__init__(
            splitter_of(spec.to_json()),
            self._find_shape(spec, length),
            batch_size=self._find_batch_size(batch_size),
            personal=tuple(personal),
            aggregate=aggregate,
        )
        self._check()
        frozen = (*spec.frozen, *self._find_unreached())
        self.splitter = splitter_of(replace(spec, frozen=frozen).to_json())
        if whole_batches:
            self.splitter = splitter_of(replace(self.spec, whole_batches=True).to_json())
        elif self.batch_size != 1:
            self._find_how_to_cut()

    @property
    def spec(self) -> ModelSpec | ModuleSpec:
        """The description from which other processes cut the same model."""
        return self.splitter.spec

    def weights(self) -> dict[str, Tensor]:
        """Return the live model's tensors that travel."""
        return self.splitter.select_travelling(state_of(self.model))

    def _require_example(self) -> dict[str, Tensor]:
        """Return the example that a module is traced with; raises ModelError without one."""
        if self._example is None:
            raise ModelError(
                f"SplitModel needs an example to cut {type(self.model).__name__}: pass one batch "
                "of your loader, example=next(iter(loader))"
            )
        return self._example

    def _find_inputs(self) -> tuple[str, ...]:
        example = self._require_example()
        if set(example) == {INPUTS, LABELS}:
            return (INPUTS,)
        named = tuple(key for key in list_arguments(self.model) if key in example)
        if not named:
            raise ModelError(
                f"no tensor of the example ({', '.join(map(repr, example))}) is an argument "
                f"of {type(self.model).__name__}.forward: name what it reads by inputs=(...)"
            )
        return named

    def _find_batch_size(self, given: int | None) -> int:
        if given is None and self._example is not None:
            sizes = [len(tensor) for tensor in self._example.values() if tensor.dim()]
            if len(sizes) < len(self._example):
                raise ModelError("the example holds a single number: pass a batch, not one item")
            given = next(iter(sizes), None)
        if not isinstance(given, int) or given < 1:
            raise ModelError(
                "SplitModel needs the batch_size of your loader, a whole number of at least 1, got "
                f"{given!r}"
            )
        return given

    def _find_shape(self, spec: ModelSpec | ModuleSpec, length: int | None) -> BatchShape:
        if isinstance(spec, ModuleSpec):
            return BatchShape(source_length=length or 1)
        name = str(unwrap_model(self.model).main_input_name)
        if length is None and name == "input_ids":
            ids = (self._example or {}).get(name)
            if ids is None:
                raise ModelError(
                    "SplitModel needs the length of texts in tokens, such as length=128"
                )
            length = ids.shape[-1]
        if length is not None and not (isinstance(length, int) and length > 0):
            raise ModelError(f"length must be a whole number of at least 1, got {length!r}")
        return BatchShape(source_length=length or 1, target_length=length or 1)

    def _check(self) -> None:
        """Raise ModelError unless the parts compute what the model does."""
        batch, splitter = self._example, self.splitter
        if isinstance(self.spec, ModuleSpec):
            with translate_errors(f"{type(self.model).__name__} {_NOT_APART}"):
                profile_model(splitter, self.shape)
        if batch is None and isinstance(splitter, Splitter) and not splitter.decodes:
            batch = self._make_up_inputs(splitter)
        if batch is not None and not splitter.decodes:
            _check_exact(self.model, splitter, take_first_examples(batch))
        if self._example is not None:
            _check_loss(self.model, splitter, take_first_examples(self._example))

    def _find_how_to_cut(self) -> None:
        """Describe by what batches may be cut, and tell where they may not."""
        splitter, batch, found = self.splitter, self._example, None
        if batch is None and isinstance(splitter, Splitter) and not splitter.has_own_loss:
            batch = make_up_batch(splitter)
        if splitter.whole_batches:
            why = "its layers learn from batches as a whole"
        elif batch is None:
            why = "its loss must be tried on a batch first: pass example=next(iter(loader))"
        else:
            found = find_means(splitter, self.weights(), batch)
            why = (
                f"its loss is not a mean over {splitter.objective.weight!r}: if it divides by the "
                "sum of a tensor of the batch, name that tensor by weight="
            )
        changes: dict[str, Any] = {"whole_batches": True}
        if found is None:
            _log.warning("%s gets whole batches, uncut: %s", type(self.model).__name__, why)
        else:
            changes = {"weight": found.weight, "complete": found.complete}
        self.splitter = splitter_of(replace(self.spec, **changes).to_json())

    def _make_up_inputs(self, splitter: Splitter) -> dict[str, Tensor]:
        """Make up two examples without labels, for a model of transformers."""
        length = min(self.shape.source_length, 8)
        return make_example_inputs(splitter.input_config, splitter.input_name, length, examples=2)

    def _find_unreached(self) -> tuple[str, ...]:
        """Find the keys ahead of the head that the user's own training leaves alone.

        No gradient reaches them past a `detach` or `no_grad` of forward, which a cut would lose.
        """
        splitter, batch = self.splitter, self._example
        if isinstance(splitter, Splitter):
            if not splitter.spec.model_class or (batch is None and splitter.decodes):
                return ()
            batch = self._make_up_inputs(splitter) if batch is None else batch
        assert batch is not None
        model = splitter.build_whole(self.weights(), trains=True)
        trained = {k: p for k, p in model.named_parameters() if p.requires_grad}
        reached = set[str]()
        for key, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(partial(_note, reached, key))
        for mode in (True, False):  # a block may be skipped at random in training
            model.train(mode)
            with (
                translate_errors(_UNTRAINED),
                torch.enable_grad(),
                torch.random.fork_rng(devices=()),
            ):
                outputs = splitter.run_whole(model, take_first_examples(batch))
                if self._example is None:
                    ends = [numbers.sum() for numbers in numbers_of(outputs)]
                else:
                    ends = [splitter.loss_of(outputs, take_first_examples(batch))]
                if ends := [end for end in ends if end.requires_grad]:
                    torch.autograd.backward(ends)
            if len(reached) == len(trained):
                break
        ahead = set(splitter.all_keys()).difference(splitter.edge_keys()) if reached else ()
        return tuple(key for key in trained if key in ahead and key not in reached)


def as_batch(batch: Loaded) -> dict[str, Tensor]:
    """Return a batch of any loader as a mapping of tensors; raises ModelError for others."""
    if isinstance(batch, Mapping):  # transformers' BatchEncoding is one, too
        found = {str(key): value for key, value in batch.items()}
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        found = dict(zip((INPUTS, LABELS), batch, strict=True))
    else:
        raise ModelError(
            "a batch must be a mapping of tensors, or a pair of inputs and labels, got "
            f"{type(batch).__name__}: give the DataLoader a collate_fn that makes one"
        )
    wrong = next((key for key, value in found.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        raise ModelError(
            f"{wrong!r} of the batch is a {type(found[wrong]).__name__}, not a tensor: give the "
            "DataLoader a collate_fn that leaves it out or makes a tensor of it"
        )
    return found


def _note(reached: set[str], key: str, parameter: Tensor) -> None:
    """Note that a gradient came, which is of no further use."""
    reached.add(key)
    parameter.grad = None


def _check_loss(model: nn.Module, splitter: AnySplitter, batch: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless the example has a loss and a weight."""
    with _evaluate(model), torch.no_grad():
        splitter.loss_of(splitter.run_whole(model, batch), batch)
    weight = splitter.weight_of(batch)
    if not weight >= 0:
        raise ModelError(f"the example weighs {weight:g}: {splitter.spec.weight!r} must be >= 0")


def _check_exact(model: nn.Module, splitter: AnySplitter, batch: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless all parts together compute the live model's scores."""
    weights = splitter.select_travelling(state_of(model))
    unread = f"{type(model).__name__} cannot read the example"
    with translate_errors(unread), _evaluate(model), torch.no_grad():
        expected = numbers_of(splitter.run_whole(model, batch))
    apart = f"{type(model).__name__} {_NOT_APART}"
    with translate_errors(apart, (Exception,)), torch.no_grad():  # whatever the user's code does
        embedding = splitter.build_front(weights).train(False)
        segment = splitter.build_segment(0, splitter.num_blocks, weights).train(False)
        hidden, context = splitter.embed(embedding, weights, batch)
        edge = splitter.build_edge(weights).train(False)
        found = numbers_of(edge.outputs(segment(hidden, context), context))
    if len(found) != len(expected) or not all(map(_close, found, expected)):
        raise ModelError(
            f"{type(model).__name__} cannot be split: its parts compute other numbers than the "
            "whole model; what runs after its blocks may read more than their result, or other "
            "machines build it with other arguments"
        )


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether tensors are equal up to rounding, relative to the largest number."""
    if ours.shape != theirs.shape or not theirs.numel():
        return ours.shape == theirs.shape
    return float((ours - theirs).abs().max()) <= CLOSE * max(float(theirs.abs().max()), 1.0)


@contextmanager
def _evaluate(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode in the body, and afterwards each module's own mode."""
    modes = {module: module.training for module in model.modules()}
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _find_builder(model: Any, arguments: Mapping[str, object] | None) -> tuple[Any, str]:
    """Return what builds the model elsewhere, and its arguments as JSON; raises ModelError."""
    if isinstance(model, nn.Module):
        if arguments is not None:
            raise ModelError("arguments belong to what builds a model: SplitModel(Net, arguments=)")
        return type(model), "{}"
    if isinstance(model, type) and issubclass(model, PreTrainedModel):
        raise ModelError(f"SplitModel needs a live {model.__name__}, not the class: load it first")
    if isinstance(model, type) and not issubclass(model, nn.Module):
        raise ModelError(f"SplitModel needs an nn.Module, got the class {model.__name__}")
    if not callable(model):
        raise ModelError(
            f"SplitModel needs an nn.Module, got {model!r}: make it first, or load it by "
            "from_pretrained"
        )
    try:
        return model, json.dumps(dict(arguments or {}), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise ModelError(
            f"arguments of SplitModel must be JSON, since other machines get them: {cause}"
        ) from cause
