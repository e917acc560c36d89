"""Generation at the edge: the library's own ``generate``, fed with what the devices computed.

The decoder of an encoder-decoder model gets the encoder's output once and decodes here with a
cache. The lower blocks of a decoder-only model are on devices: for every new token the head's
forward asks for its hidden states, which pass through the devices, each with a cache of its own.
With beam search every row of a step names the row of the last step that it continues, and the
devices reorder their caches accordingly.

Each text is sampled from a generator of its own, seeded like torch's: texts that are generated at
the same time do not affect each other, and each is what the unsplit model samples from that seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.families import CACHE
from collapipe_flwr.models.foreign_errors import translate_errors
from collapipe_flwr.models.stack import Stack, TopCache

# Token ids (B, T) and the rows (B,) that they continue -> hidden states (B, T, D) of the devices
Ask = Callable[[Tensor, Tensor | None], Tensor]
Emit = Callable[[Tensor], bool]  # new token ids (T,), maybe none -> whether to continue
# The base model's result for the next tokens (B, T) of a decoder-only model, in this thread
FEEDING: ContextVar[Callable[[Tensor], ModelOutput] | None] = ContextVar("FEEDING", default=None)
SEED = "seed"  # beside the generation settings: of the text's random generator
# Settings that change the cost of a text but not the text: a cut model has its own cache.
_OVERRIDES: dict[str, Any] = {
    "use_cache": True,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "return_dict_in_generate": False,
    "num_return_sequences": 1,
}
_UNSUPPORTED = ("guidance_scale", "dola_layers")  # they need further passes or inner blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One text to continue: hidden states (1, T, D), and its ids for decoder-only models."""

    hidden_BTD: Tensor
    attention_mask: Tensor | None = None
    input_ids: Tensor | None = None
    settings_json: str = ""  # a GenerationConfig; empty: the model's own


def _watch(emit: Emit, beams: int) -> Any:
    """Make a criterion that emits every new token, and stops when ``emit`` returns False."""
    certain = 1 if beams == 1 else 0  # new tokens after a step

    def stops(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        del scores
        stop = not emit(input_ids[0, input_ids.shape[1] - certain :])
        return torch.full((len(input_ids),), stop, dtype=torch.bool, device=input_ids.device)

    return stops


def _make_sampler(seed: int) -> Callable[..., Any]:
    """Make the library's own sampling use its own generator, by masking all other tokens."""
    random = torch.Generator().manual_seed(seed)

    def draw(input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        probabilities = scores.softmax(-1).to("cpu")  # the generator's device
        chosen = torch.multinomial(probabilities, 1, generator=random).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def sample(model: Any, input_ids: Tensor, logits_processor: Any, **model_kwargs: Any) -> Any:
        drawn = type(logits_processor)([*logits_processor, draw])
        return model._sample(input_ids, logits_processor=drawn, **model_kwargs)

    return sample


def generate(model: Any, stack: Stack, prompt: Prompt, emit: Emit, ask: Ask) -> Tensor:
    """Generate the new token ids (T,) of one text, special ones included.

    ``emit`` gets each at once; with beam search they are known at the end only, and it gets none.
    Raises ModelError where the library fails.
    """
    settings, seed = _read_settings(model, prompt.settings_json)
    beams = settings.num_beams or 1
    common: dict[str, Any] = {
        "generation_config": settings,
        "stopping_criteria": StoppingCriteriaList([_watch(emit, beams)]),
    }
    if settings.do_sample:
        if beams > 1:
            raise ModelError("num_beams must be 1 where texts are sampled: set one of the two")
        common["custom_generate"] = _make_sampler(seed)
    kinds = ValueError, IndexError, TypeError, RuntimeError
    with translate_errors("the edge cannot generate", kinds):
        if stack.family.decodes:
            tokens = _decode(model, stack, prompt, common)
        else:
            tokens = _continue(model, stack, prompt, ask, common)
    return tokens


def _decode(model: Any, stack: Stack, prompt: Prompt, common: dict[str, Any]) -> Tensor:
    hidden_BTD = stack.finish(prompt.hidden_BTD)["last_hidden_state"]
    output: Tensor = model.generate(
        encoder_outputs=BaseModelOutput(last_hidden_state=hidden_BTD),
        attention_mask=prompt.attention_mask,
        **common,
    )
    speech = stack.family.input_name == "input_features"
    return output[0, 0 if speech else 1 :]  # Whisper's output already lacks its first tokens


def _continue(model: Any, stack: Stack, prompt: Prompt, ask: Ask, common: dict[str, Any]) -> Tensor:
    assert prompt.input_ids is not None
    cache = TopCache(model.config, stack.first_block, stack.stop_block)
    arrived = [prompt.hidden_BTD]

    def feed(ids_BT: Tensor) -> ModelOutput:
        if arrived:
            hidden_BTD = arrived.pop().expand(len(ids_BT), -1, -1)
        else:
            hidden_BTD = ask(ids_BT, cache.take_rows(len(ids_BT)))
        output = stack.finish(stack.run_blocks(hidden_BTD, {}, cache))
        output[CACHE] = cache
        return output

    token = FEEDING.set(feed)
    try:
        output: Tensor = model.generate(
            prompt.input_ids,
            attention_mask=torch.ones_like(prompt.input_ids),
            **{CACHE: cache},
            **common,
        )
    finally:
        FEEDING.reset(token)
    return output[0, prompt.input_ids.shape[1] :]


def _read_settings(model: Any, text: str) -> tuple[GenerationConfig, int]:
    """Read the generation settings of a text and its seed; the model's own if ``text`` is empty."""
    with translate_errors(
        "generation settings cannot be read", (ValueError, TypeError, AttributeError)
    ):
        values = json.loads(text) if text else model.generation_config.to_dict()
        seed = int(values.pop(SEED, 0))
        settings = GenerationConfig.from_dict({**values, **_OVERRIDES})
    for key in _UNSUPPORTED:
        if getattr(settings, key, None) not in (None, 1):
            raise ModelError(
                f"generation with {key} runs the model in ways that a cut one cannot: remove it "
                "from generation_config.json"
            )
    return settings, seed
