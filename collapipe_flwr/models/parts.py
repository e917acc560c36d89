"""The parts of a transformers model: embedding, segment of blocks, and edge (decoder or head)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.domain import IGNORED_LABEL
from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.families import find_most_positions, find_rope_switch
from collapipe_flwr.models.foreign_errors import first_lines
from collapipe_flwr.models.generation import FEEDING, Ask, Emit, Prompt, generate
from collapipe_flwr.models.layout import Holdings
from collapipe_flwr.models.module_call import (
    InputTracker,
    StopForward,
    list_arguments,
    stop_forward,
)
from collapipe_flwr.models.next_tokens import (
    Piece,
    average_pieces,
    count_piece_tokens,
    cut_tokens,
)
from collapipe_flwr.models.part import Borrower, LossPart, Part, Weights
from collapipe_flwr.models.skeleton import make_blank_pixels
from collapipe_flwr.models.stack import Around, PartCache, Perturb, Stack, disable_cache
from collapipe_flwr.models.tasks import (
    CAUSAL_LM,
    LABELS,
    Batch,
    ModelTask,
    Objective,
    choose_best,
    numbers_of,
    scores_of,
)

_LIMITS = ("vocab_size", "max_position_embeddings", "image_size", "max_source_positions")

_TOKENS = ("input_ids", "token_type_ids")  # GPT-2 looks both up in one table


class EmbeddingPart(Borrower):
    """Token, patch or audio embedding: the library's own forward, stopped at the first block.

    ``unread`` are inputs that an own head does not pass on.
    """

    def __init__(
        self, stack: Stack, holdings: Holdings, weights: Weights, unread: AbstractSet[str]
    ) -> None:
        self._accepted = set(list_arguments(stack.module)) - unread
        readers = tuple(name for name in _TOKENS if name in self._accepted)
        ids_of = dict.fromkeys(holdings.layout.ties, readers)
        super().__init__(stack.model, holdings, weights, ids_of)
        self._stack = stack.module
        self._switch = find_rope_switch(stack.model.config.to_dict())
        stack.entrance.forward = stop_forward

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Embed ``input_ids``, ``pixel_values`` or ``input_features`` as (B, T, D).

        Further tensors of a batch (labels, ...) are ignored; raises ModelError if none fits.
        """
        known = {key: value for key, value in inputs.items() if key in self._accepted}
        self._refuse_other_angles(known)
        try:
            self._stack(**known)
        except StopForward as reached:
            hidden_BTD: Tensor = reached.args[0]
            return hidden_BTD
        except (ValueError, TypeError, IndexError, RuntimeError) as cause:
            raise ModelError(
                explain_inputs(self.model.config, known)
                or f"the embedding cannot read {self._describe(known)}: {first_lines(cause)}; "
                "check the tokenizer and the maximum length"
            ) from cause
        raise ModelError("the model returned without running its first block")

    def _refuse_other_angles(self, inputs: Mapping[str, Tensor]) -> None:
        ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
        if self._switch is None or ids is None:
            return
        length = ids.shape[-1] if positions is None else int(positions.max()) + 1
        if length > self._switch:
            raise ModelError(
                f"a text has {length} tokens, but beyond {self._switch} a model with the rope_type "
                "'longrope' has other angles from a text's beginning on, which micro-batches and "
                f"the caches of generation cannot follow: shorten texts to {self._switch} tokens"
            )

    def _describe(self, inputs: Mapping[str, Tensor]) -> str:
        config = self.model.config
        shapes = {key: tuple(value.shape) for key, value in inputs.items()}
        limits = {key: getattr(config, key) for key in _LIMITS if hasattr(config, key)}
        return f"inputs of shape {shapes} with {limits}"


class SegmentPart(Part):
    """Consecutive blocks on one device."""

    def __init__(self, stack: Stack, holdings: Holdings, weights: Weights) -> None:
        super().__init__(stack.model, holdings, weights)
        self._stack = stack

    @property
    def block_range(self) -> range:
        """The blocks that this part holds, counted from 0 over the whole model."""
        return range(self._stack.first_block, self._stack.stop_block)

    def compute_again(self, around: Around | None) -> None:
        """Turn activation checkpointing of each block on, or with None off.

        ``around`` is entered for the second computation of each block.
        """
        self._stack.again = around

    def perturb(self, behind: int, perturb: Perturb) -> None:
        """Replace hidden states behind the first ``behind`` of these blocks.

        ``perturb`` gets them and the mask (B, T), 0 at padding.
        """
        self._stack.perturbed[self._stack.first_block + behind] = perturb

    def forward(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> Tensor:
        """Compute the hidden states (B, T, D) after this segment's last block.

        ``context`` may hold ``attention_mask`` (B, T), any integer or boolean type, and
        ``position_ids``; other tensors are ignored.
        """
        return self._stack.run_blocks(hidden_BTD, context)

    def new_cache(self) -> PartCache:
        """Make an empty cache for the generation of one text; see ``advance``."""
        return PartCache(self.model.config, self._stack.first_block, self._stack.stop_block)

    def advance(self, hidden_BTD: Tensor, cache: PartCache) -> Tensor:
        """Compute hidden states of the tokens that follow those in the cache, which grows."""
        return self._stack.run_blocks(hidden_BTD, {}, cache)


class EdgePart(LossPart):
    """Upper blocks and a head, or a whole decoder.

    A head that is not a class of the library (``own_head``) may call its base model in any way, so
    it gets the user's own arguments, and its base model ignores them.
    """

    def __init__(
        self,
        stack: Stack,
        holdings: Holdings,
        weights: Weights,
        task: ModelTask,
        objective: Objective,
        *,
        own_head: bool,
    ) -> None:
        super().__init__(stack.model, holdings, weights, objective)
        self._stack = stack
        self._task = task
        self._own_head = own_head and not stack.family.decodes
        self._arrived_BTD: Tensor | None = None  # while such a head runs
        self._accepted = {*list_arguments(stack.model)} - {stack.family.entry, "encoder_outputs"}
        if objective.loss is not None and not stack.family.decodes:
            self._accepted -= {LABELS}  # else the library computes a loss that is not used
        if self._works_by_token(objective):
            vocabulary = stack.model.config.get_text_config().vocab_size
            self.piece_tokens = count_piece_tokens(vocabulary)
        if not stack.family.decodes:
            # The head calls its base model as always, and gets what the devices computed. The
            # reference is weak, so that memory is freed as soon as the part is dropped.
            edge = weakref.ref(self)
            stack.module.forward = lambda *args, **kwargs: _dereference(edge)._finish(
                *args, **kwargs
            )

    def forward(self, hidden_BTD: Tensor, context: Batch) -> Tensor:
        """Compute the loss as ``LossPart`` does, of a language model over pieces of the tokens."""
        pieces = self._cut_tokens(context)
        if not pieces or self.weight_of(context) == 0:
            return super().forward(hidden_BTD, context)
        return average_pieces(
            lambda *piece: self._objective.loss_of(self._score(*piece), context),
            self._stack.run_blocks(hidden_BTD, context),
            pieces,
        )

    def judge(
        self, hidden_BTD: Tensor, context: Batch, *, scores: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute loss and predictions as ``LossPart`` does, ids over pieces of the tokens."""
        pieces = [] if scores else self._cut_tokens(context, every=True)
        if not pieces:
            return super().judge(hidden_BTD, context, scores=scores)
        tokens = self._stack.run_blocks(hidden_BTD, context).flatten(0, 1)
        loss, ids = tokens.new_zeros(()), list[Tensor]()
        for piece in pieces:
            found = self._score(tokens[piece.places_BT], piece.labels_BT)
            if piece.share:
                loss = loss + self._objective.loss_of(found, context) * piece.share
            ids.append(choose_best(scores_of(found))[piece.stands_BT])
        return loss, torch.cat(ids).view(hidden_BTD.shape[:2])

    def outputs(self, hidden_BTD: Tensor, context: Mapping[str, Tensor]) -> ModelOutput:
        """Compute the task head's full output: ``logits``, and ``loss`` where there are labels."""
        hidden_BTD = self._stack.run_blocks(hidden_BTD, context)
        known: dict[str, Any] = {k: v for k, v in context.items() if k in self._accepted}
        known.update(disable_cache(self.model))
        if self._stack.family.decodes:
            return self._call(encoder_outputs=self._stack.finish(hidden_BTD), **known)
        if self._own_head:
            return self._call_own(hidden_BTD, known)
        return self._call(**{self._stack.family.entry: hidden_BTD}, **known)

    def generate(self, prompt: Prompt, emit: Emit, ask: Ask) -> Tensor:
        """Generate the new token ids (T,) of one text; see ``generation.generate``."""
        return generate(self.model, self._stack, prompt, emit, ask)

    def _works_by_token(self, objective: Objective) -> bool:
        """Return whether the head is the library's for next tokens, frozen and without dropout."""
        stack, model = self._stack, self._stack.model
        if self._task.name != CAUSAL_LM or self._own_head or stack.family.decodes:
            return False
        if objective.loss is not None or model.loss_function is not ForCausalLMLoss:
            return False
        in_blocks = {id(module) for block in stack.blocks for module in block.modules()}
        outside = [module for module in model.modules() if id(module) not in in_blocks]
        drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in outside)
        own = chain.from_iterable(module.parameters(recurse=False) for module in outside)
        return not drops and not any(parameter.requires_grad for parameter in own)

    def _cut_tokens(self, context: Batch, *, every: bool = False) -> list[Piece]:
        if self.piece_tokens is None or LABELS not in context:
            return []
        return cut_tokens(context[LABELS], self.piece_tokens, every=every)

    def _score(self, hidden_BTD: Tensor, labels_BT: Tensor) -> ModelOutput:
        """Compute the head's output of a piece."""
        given = {self._stack.family.entry: hidden_BTD, LABELS: labels_BT}
        return self._call(**given, **disable_cache(self.model))

    def _call(self, **arguments: Any) -> ModelOutput:
        try:
            output: ModelOutput = self.model(**arguments)
        except (ValueError, IndexError, RuntimeError) as cause:
            raise ModelError(
                explain_labels(self.model.config, self._task, arguments.get("labels"))
                or f"the edge cannot compute its output: {first_lines(cause)}"
            ) from cause
        return output

    def _call_own(self, hidden_BTD: Tensor, known: dict[str, Any]) -> ModelOutput:
        name = self._stack.family.input_name
        if name in known:
            return self._call_base(hidden_BTD, known)
        if name != "pixel_values":
            raise ModelError(f"{name!r} did not come to the edge with the hidden states")
        config: Any = self._stack.module.config
        blank = make_blank_pixels(config, hidden_BTD)  # the true ones stay on the control unit
        with InputTracker(blank) as tracker:
            output = self._call_base(hidden_BTD, {**known, name: blank})
        if tracker.reaches([*numbers_of(output)]):
            raise ModelError(
                f"the head computes with {name!r} itself, which stays on the control unit: give "
                "what it needs of it another name in the batch, such as 'labels'"
            )
        return output

    def _call_base(self, hidden_BTD: Tensor, known: dict[str, Any]) -> ModelOutput:
        """Call the head, whose base model returns what the devices computed."""
        self._arrived_BTD = hidden_BTD
        try:
            return self._call(**known)
        finally:
            self._arrived_BTD = None

    def _finish(self, *args: Tensor, **kwargs: Any) -> Any:
        """Return the base model's result, computed from the devices' hidden states."""
        if self._arrived_BTD is not None:
            for name in ("output_hidden_states", "output_attentions"):
                if kwargs.get(name):
                    raise ModelError(
                        f"the head asks its base model for {name}, which are on the devices: let "
                        "it read the last hidden states only"
                    )
            found = self._stack.finish(self._arrived_BTD)
            return found.to_tuple() if kwargs.get("return_dict") is False else found
        feed = FEEDING.get()
        if feed is not None:
            ids_BT = kwargs.get("input_ids")
            return feed(args[0] if ids_BT is None else ids_BT)
        hidden_BTD = kwargs.get(self._stack.family.entry)
        return self._stack.finish(args[0] if hidden_BTD is None else hidden_BTD)


def _dereference(edge: weakref.ref[EdgePart]) -> EdgePart:
    part = edge()
    assert part is not None, "the head outlived its part"
    return part


def explain_inputs(config: Any, inputs: Mapping[str, Tensor]) -> str | None:
    """Describe the fault of a batch's tokens in one sentence; None if they have none."""
    ids = inputs.get("input_ids")
    if ids is None or ids.numel() == 0:
        return None
    vocabulary, positions = getattr(config, "vocab_size", None), find_most_positions(config)
    wrong = _find_outside(ids, vocabulary)
    if wrong is not None:
        return (
            f"the batch holds token {wrong}, but the model's vocabulary has {vocabulary} tokens: "
            "use the tokenizer that belongs to the model"
        )
    if positions is not None and ids.shape[-1] > positions:
        return (
            f"the batch holds sequences of {ids.shape[-1]} tokens, but the model has only "
            f"{positions} positions: shorten them, or raise max_position_embeddings"
        )
    return None


def explain_labels(config: Any, task: ModelTask, labels: Tensor | None) -> str | None:
    """Describe the fault of a batch's labels in one sentence; None if they have none."""
    if labels is None or labels.is_floating_point():
        return None
    vocabulary = getattr(config, "decoder_vocab_size", None) or getattr(config, "vocab_size", None)
    classes: Any = config.num_labels if task.labelled else vocabulary
    wrong = _find_outside(labels[labels != IGNORED_LABEL], classes)
    if wrong is None:
        return None
    way_out = (
        "give the model as many labels as the data has (num_labels)"
        if task.labelled
        else "use the tokenizer that belongs to the model"
    )
    return f"the batch holds the label {wrong}, but the model knows 0 to {classes - 1}: {way_out}"


def _find_outside(ids: Tensor, size: int | None) -> int | None:
    """Return one of the ids that is not in 0 .. ``size`` - 1; None if all are."""
    if size is None or ids.numel() == 0:
        return None
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0:
        return lowest
    return highest if highest >= size else None
