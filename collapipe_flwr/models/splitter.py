"""The cut: one transformers model into embedding | segments of blocks | edge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.core.imports import is_within
from collapipe_flwr.models.any_splitter import AnySplitter, shapes_of
from collapipe_flwr.models.checkpoint import (
    CheckpointSource,
    Completed,
    digest_of,
    load_checkpoint,
)
from collapipe_flwr.models.discovery import find_family
from collapipe_flwr.models.families import (
    Family,
    count_device_blocks,
    find_blocks,
    find_most_positions,
    find_stack_path,
    refuse_inexact,
)
from collapipe_flwr.models.front import FrontPart
from collapipe_flwr.models.layout import EDGE, EMBEDDING, make_layout
from collapipe_flwr.models.lora import (
    PEFT_PREFIX,
    draw_adapter,
    is_adapter,
    is_superseded,
    key_of,
    list_adapters,
)
from collapipe_flwr.models.module_call import list_arguments
from collapipe_flwr.models.module_splitter import ModuleSplitter
from collapipe_flwr.models.part import Part, Weights, normalises_batches
from collapipe_flwr.models.parts import EdgePart, EmbeddingPart, SegmentPart
from collapipe_flwr.models.products import Adapter
from collapipe_flwr.models.skeleton import (
    build_random,
    build_skeleton,
    copy_skeleton,
    make_example_inputs,
)
from collapipe_flwr.models.spec import BatchShape, ModelSpec, ModuleSpec, spec_of
from collapipe_flwr.models.stack import Stack, takes_any_argument
from collapipe_flwr.models.tasks import (
    EXAMPLES,
    LABELS,
    OWN_TASK,
    Objective,
    count_labels,
    find_task,
    load_loss,
)

_COMMON_INPUTS = frozenset({"attention_mask", "position_ids"})
_READ_BY_LOSSES = frozenset({"shift_labels", "num_items_in_batch"})  # of transformers
_LARGE_INPUTS = ("pixel_values", "input_features")  # they stay on the control unit


class Splitter(AnySplitter):
    """The cut of a transformers model, ``spec``, into parts that hold only their own tensors.

    With adapters over a checkpoint, the frozen weights are *resident*: each part
    reads its own from the checkpoint on its machine. The keys below then name what travels.
    Raises ModelError if the model cannot be built or split.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec: ModelSpec = spec
        self.task = find_task(spec.task)
        own_loss = bool(spec.loss) or self.task is OWN_TASK
        self.has_own_loss = own_loss or bool(spec.model_class)  # not known by the task
        shifts_itself = bool(spec.loss) and not self.task.label_per_example
        self.objective = Objective(
            weight=spec.weight or (EXAMPLES if own_loss else LABELS),
            targets=count_labels if shifts_itself else self.task.targets,
            loss=load_loss(spec.loss),
        )
        self._family = find_family(spec)
        self._skeleton = skeleton = build_skeleton(spec)
        refuse_inexact(skeleton.config, self._family, spec.task)
        total_blocks = len(find_blocks(skeleton, self._family))
        self.held_blocks = spec.held_blocks
        self.num_blocks = count_device_blocks(total_blocks, spec, self._family)
        self._layout = make_layout(skeleton, self._family, spec)
        if self.held_blocks:
            self._refuse_trained()
        self.config = skeleton.config
        self.has_record = self._family.inputs is not None  # its type is known, not found by a trace
        self.most_tokens = find_most_positions(self.config)  # of a sequence; None: no limit
        self.input_name = self._family.input_name
        stack = skeleton.get_submodule(find_stack_path(skeleton, self._family))
        self.input_config = stack.config  # of pictures and sound: their part's own
        self._body_inputs, self._head_inputs = (set(list_arguments(m)) for m in (stack, skeleton))
        if takes_any_argument(skeleton):
            self._head_inputs |= self._body_inputs
        self._context_keys = _choose_context_keys(self._family, spec.task)
        self._unread = set[str]()
        if spec.model_class:
            self._unread = (self._body_inputs | _COMMON_INPUTS) - self._head_inputs
        self.shapes = shapes_of(skeleton.state_dict(), self._layout)
        self.state_keys = tuple(
            key_of(path) for path in skeleton.state_dict() if not is_superseded(path)
        )
        self.prefix = PEFT_PREFIX if spec.adapter_json else ""
        self.decodes = self._family.decodes
        self.generates = self.decodes or self._family.caches
        self.drops = _drops(skeleton, spec)
        self.whole_batches = spec.whole_batches or normalises_batches(skeleton)

    def context(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self.has_own_loss and (odd := _READ_BY_LOSSES.intersection(batch)):
            raise ModelError(
                f"the batch holds {min(odd)!r}, by which transformers computes another loss than "
                "by labels alone: leave it out, the loss is a mean over all labels of the batch"
            )
        return {key: value for key, value in batch.items() if self._travels(key)}

    def _travels(self, key: str) -> bool:
        """Return whether a tensor of a batch travels to the edge.

        Own heads get their own arguments, and own losses all that the body does not read.
        """
        if key in self._unread:
            return False
        if key in self._context_keys:
            return True
        if self.spec.model_class and not self.decodes and key in self._head_inputs:
            return key not in _LARGE_INPUTS
        own = self.spec.loss or self.spec.model_class or key == self.spec.weight
        return bool(own) and key not in self._body_inputs

    def targets_of(self, batch: Mapping[str, Tensor]) -> tuple[str, ...]:
        body = self._body_inputs | _COMMON_INPUTS
        return tuple(key for key in batch if key not in body)

    def run_whole(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        known = {key: value for key, value in batch.items() if key in self._head_inputs}
        if self.spec.loss and not self.decodes:
            known.pop(LABELS, None)
        return model(**known)

    def example(self, shape: BatchShape) -> tuple[dict[str, Tensor], int]:
        """Make one example of the task.

        It has no label if that is one class (its loss costs nothing), or if the task is an own one.
        """
        inputs = make_example_inputs(self.input_config, self.input_name, shape.source_length)
        if self.task.label_per_example or self.task is OWN_TASK:
            return inputs, 1
        length = shape.target_length if self.decodes else shape.source_length
        return {**inputs, "labels": torch.ones(1, length, dtype=torch.long)}, 1

    def front_keys(self, blocks: int) -> tuple[str, ...]:
        """Return all keys of the embedding and the first ``blocks`` blocks."""
        return self._layout.keys_of(EMBEDDING, *range(blocks))

    def count_frozen(self) -> int:
        """Count the blocks that, like the embedding, nothing trains, up to the first that does."""
        most = self.held_blocks + self.num_blocks
        trained = set(self._layout.owners).difference(self.constant_keys)
        first = (n for n in range(most + 1) if not trained.isdisjoint(self.front_keys(n)))
        return 0 if self.ties else max(next(first, most + 1) - 1, 0)

    def find_dropout(self, blocks: int) -> str | None:
        """Find a module of the embedding or the first ``blocks`` blocks that drops in training."""
        stack = self._skeleton.get_submodule(find_stack_path(self._skeleton, self._family))
        names = [f"{self._family.blocks}.{i}" for i in range(self.held_blocks + self.num_blocks)]
        behind = [*names[blocks:], *self._family.after]
        return next(
            (
                path or type(module).__name__
                for path, module in stack.named_modules()
                if not is_within(path, behind) and _drops_itself(module)
            ),
            None,
        )

    def _refuse_trained(self) -> None:
        """Raise ModelError where something trains ahead of the devices' blocks."""
        held = f"the control unit cannot keep {self.held_blocks} blocks: "
        if self.ties:
            raise ModelError(
                f"{held}the edge lends it rows of {min(self.ties)!r}: set ties to 'untie'"
            )
        front = self.front_keys(self.held_blocks)
        trained = next((key for key in front if key not in self.constant_keys), None)
        if trained is not None:
            raise ModelError(f"{held}{trained!r} is trained: freeze it")

    @cached_property
    def adapters(self) -> tuple[Adapter, ...]:
        return list_adapters(self._skeleton) if self.spec.adapted else ()

    # Weights

    def first_weights(self, seed: int) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Return initial values of all keys: from ``spec.pretrained``, or else from ``seed``.

        The second result are the keys of a head that the checkpoint lacks; they are drawn as well.
        Raises ModelError if it cannot be read or lacks tensors of the model's body.
        """
        model, drawn = self._make_first_model(seed)
        differing = self._find_untied(model)
        if differing:
            raise ModelError(
                f"the checkpoint {self.spec.pretrained!r} holds an own {differing[0]!r}, which its "
                "configuration ties to another table; describe the model by make_spec"
            )
        found = model.state_dict()
        weights = {
            key: draw_adapter(key, self.shapes[key][0], seed)
            if is_adapter(key)
            else found[key].detach().clone()
            for key in self.all_keys()
        }
        return weights, drawn

    def find_untied_keys(self) -> tuple[str, ...]:
        """Find keys that the architecture ties, but ``spec.pretrained`` holds as unequal tables."""
        return self._find_untied(self._make_first_model(seed=0)[0])

    def find_absent_keys(self) -> tuple[str, ...]:
        """Find frozen keys that ``spec.pretrained`` lacks, as the lower layers of a new head."""
        plain = Splitter(self.spec.unadapted)
        derivable = plain.constant_keys.difference(plain.shared_keys)
        return tuple(
            key
            for key in self._layout.owners
            if key in self._layout.constants and key not in self._source and key not in derivable
        )

    @property
    def resident_keys(self) -> tuple[str, ...]:
        """The frozen weights that every machine reads itself, in the model's order."""
        return tuple(key for key in self._layout.owners if key in self._layout.resident)

    def read_resident(self, keys: Iterable[str]) -> dict[str, Tensor]:
        return {key: self._read(key) for key in keys}

    def _read(self, key: str) -> Tensor:
        """Read a frozen tensor; raises ModelError unless it is that of the user's live model."""
        found = self._source.read(key)
        if (digest := self._unproved.get(key)) is not None:
            if digest != digest_of(found):
                raise ModelError(
                    f"the checkpoint {self.spec.pretrained!r} holds another {key!r} here than the "
                    "base of the PeftModel on the server: copy the server's folder to this machine"
                )
            self._unproved.pop(key, None)
        return found

    # Parts

    def build_embedding(self, weights: Weights) -> EmbeddingPart:
        holdings = self._layout.holdings_of(EMBEDDING)
        return EmbeddingPart(
            self._build_stack(0, 0), holdings, self._complete(weights), self._unread
        )

    def build_front(self, weights: Weights) -> EmbeddingPart | FrontPart:
        embedding, held = self.build_embedding(weights), range(self.held_blocks)
        return FrontPart(embedding, self._build_blocks(held, weights)) if held else embedding

    def build_segment(self, first_block: int, stop_block: int, weights: Weights) -> SegmentPart:
        return self._build_blocks(self._find_range(first_block, stop_block), weights)

    def _build_blocks(self, own: range, weights: Weights) -> SegmentPart:
        holdings = self._layout.holdings_of(*own, runs_blocks=True)
        return SegmentPart(
            self._build_stack(own.start, own.stop), holdings, self._complete(weights)
        )

    def build_edge(self, weights: Weights) -> EdgePart:
        holdings = self._layout.holdings_of(EDGE, runs_blocks=self.spec.edge_blocks > 0)
        first = self.held_blocks + self.num_blocks
        stack = self._build_stack(first, first + self.spec.edge_blocks)
        return EdgePart(
            stack,
            holdings,
            self._complete(weights),
            self.task,
            self.objective,
            own_head=bool(self.spec.model_class),
        )

    def build_whole(self, weights: Weights, *, trains: bool = False) -> PreTrainedModel:
        """Build as ``AnySplitter`` says; a model that ``trains`` keeps no cache for generation."""
        model = build_skeleton(self.spec)
        Part(model, self._layout.all_holdings(), self._complete(weights))
        for path in [p for p in model.all_tied_weights_keys if p in self._layout.owners]:
            model.all_tied_weights_keys.pop(path)
        model.train(False)
        if trains:
            model.config.use_cache = False
        return model

    def _find_untied(self, model: PreTrainedModel) -> tuple[str, ...]:
        """Find paths of tied tables with other values than their key, without adapters."""
        found = model.state_dict()
        return tuple(
            path
            for key, paths in self._layout.all_places().items()
            if not is_adapter(key)
            for path in map(key_of, paths)
            if not torch.equal(found[path], found[key])
        )

    def _make_first_model(self, seed: int) -> tuple[PreTrainedModel, tuple[str, ...]]:
        """Make the model with initial weights; also return the keys that the checkpoint lacks."""
        if self.spec.pretrained is None:
            return build_random(self.spec, seed), ()
        return load_checkpoint(self.spec, seed, body=self.body_keys)

    @property
    def body_keys(self) -> frozenset[str]:
        """The keys that a checkpoint must have: all, but those of a head without a decoder."""
        head = () if self.decodes else self._layout.keys_of(EDGE)
        return frozenset(key for key in self._layout.owners if not is_adapter(key)).difference(head)

    def _build_stack(self, first_block: int, stop_block: int) -> Stack:
        own = self.spec.model_class  # it may hold what cannot be copied
        return Stack(
            model=build_skeleton(self.spec) if own else copy_skeleton(self._skeleton),
            family=self._family,
            first_block=first_block,
            stop_block=stop_block,
        )

    def _complete(self, weights: Weights) -> Weights:
        if not self._layout.resident:
            return weights
        return Completed(weights, self._layout.resident, self._read)

    @cached_property
    def _source(self) -> CheckpointSource:
        return CheckpointSource(self.spec)

    @cached_property
    def _unproved(self) -> dict[str, str]:
        digests = self.spec.base_digests
        return dict(zip(self.resident_keys, digests, strict=True)) if digests else {}


def _choose_context_keys(family: Family, task: str) -> frozenset[str]:
    """Choose the tensors of a batch that travel down the chain beside hidden states."""
    wanted = {"attention_mask", "position_ids", "labels"}
    if family.decodes:
        wanted |= {"decoder_input_ids", "decoder_attention_mask"}
    elif task == "sequence-classification" and "masked-lm" not in family.tasks:
        wanted.add("input_ids")  # decoders classify by the last token that is not padding
    return frozenset(wanted)


def _drops(skeleton: PreTrainedModel, spec: ModelSpec) -> bool:
    """Return whether training draws numbers; heads and adapters keep dropout out of the config."""
    shares = [*_find_dropout(skeleton.config.to_dict())]
    if spec.model_class or spec.adapted:
        shares += [m.p for m in skeleton.modules() if isinstance(m, nn.Dropout)]
    return any(share > 0 for share in shares)


def _drops_itself(module: nn.Module) -> bool:
    """Return whether a module, or a function that it calls, draws what it drops in training."""
    if isinstance(module, nn.Dropout):
        return module.p > 0
    own = vars(module).items()
    return any("drop" in name and isinstance(p, float) and p > 0 for name, p in own)


def _find_dropout(settings: Mapping[str, Any]) -> Iterator[float]:
    """Yield how much is drawn in training by a configuration, in its parts as well."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _find_dropout(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            yield value


@lru_cache(maxsize=16)  # of clusters with different ranks, too
def splitter_of(spec_json: str) -> AnySplitter:
    """Return the splitter of any model, the same one in every round; raises ModelError."""
    spec = spec_of(spec_json)
    return ModuleSplitter(spec) if isinstance(spec, ModuleSpec) else Splitter(spec)
