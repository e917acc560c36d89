"""Generation at the edge: the library's own ``generate``, fed with what the devices computed.

An encoder-decoder model gets its encoder's output once and decodes here with a cache. Of a
decoder-only model the lower blocks stand on devices: for every new token the head's forward asks
for its hidden states, and the answer comes up through the devices, each with a cache of its own.
With beams every row of a step says which row of the last one it goes on from, and the devices'
caches follow.

Chance is drawn from a generator of the text's own, seeded like torch's: so texts that are made
at once do not disturb each other, and each is what the unsplit model samples from that seed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from collapipe_flwr.core.errors import ModelError
from collapipe_flwr.models.block_inputs import TopCache
from collapipe_flwr.models.stack import Stack
from collapipe_flwr.models.validation import refusing

# Token ids (B, T) and the rows (B,) that they go on from -> hidden states (B, T, D) of the devices
Ask = Callable[[Tensor, Tensor | None], Tensor]
Emit = Callable[[Tensor], bool]  # new token ids (T,), maybe none -> whether to go on
FEEDING: ContextVar[Feed | None] = ContextVar("FEEDING", default=None)
SEED = "seed"  # beside the generation settings: where chance begins
# What a text costs, not what it says: a cut model has a cache of its own, and one way to go on.
_OWN_WAY: dict[str, Any] = {
    "use_cache": True,
    "cache_implementation": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "return_dict_in_generate": False,
    "num_return_sequences": 1,
}
_FURTHER_PASSES = ("guidance_scale", "dola_layers")  # need more of the lower blocks than they give


@dataclass(slots=True, kw_only=True)
class Feed:
    """Where the head of a decoder-only model gets hidden states from, in this thread."""

    ask: Ask
    cache: TopCache
    prompt_BTD: Tensor | None  # of the devices; None once it is used

    def forward(self, stack: Stack, ids_BT: Tensor) -> ModelOutput:
        """What the base model returns for the tokens that come next."""
        if self.prompt_BTD is not None:
            hidden_BTD = self.prompt_BTD.expand(len(ids_BT), -1, -1)
            self.prompt_BTD = None
        else:
            hidden_BTD = self.ask(ids_BT, self.cache.take_rows(len(ids_BT)))
        output = stack.finish(stack.run_blocks(hidden_BTD, {}, self.cache))
        output["past_key_values"] = self.cache
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What arrived of one text: hidden states (1, T, D), and its ids for decoder-only models."""

    hidden_BTD: Tensor
    attention_mask: Tensor | None = None
    input_ids: Tensor | None = None
    settings_json: str = ""  # a GenerationConfig; empty: the model's own


class _Watch(StoppingCriteria):
    """Tells of every new token, and stops where nobody listens."""

    def __init__(self, emit: Emit, beams: int) -> None:
        self._emit = emit
        self._new = 1 if beams == 1 else 0  # tokens that are certain after a step

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        del scores, kwargs
        stop = not self._emit(input_ids[0, input_ids.shape[1] - self._new :])
        return torch.full((len(input_ids),), stop, dtype=torch.bool, device=input_ids.device)


class _Draw(LogitsProcessor):
    """Chooses as the library would, but by a generator of its own: only that token stays."""

    def __init__(self, seed: int) -> None:
        self._chance = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        del input_ids
        chances = scores.softmax(-1).to("cpu")  # where the generator draws, wherever they are from
        chosen = torch.multinomial(chances, 1, generator=self._chance).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def _sampling(seed: int) -> Callable[..., Any]:
    """The library's own sampling, with `_Draw` behind all that shapes its probabilities."""

    def sample(model: Any, input_ids: Tensor, logits_processor: Any, **model_kwargs: Any) -> Any:
        drawn = type(logits_processor)([*logits_processor, _Draw(seed)])
        return model._sample(input_ids, logits_processor=drawn, **model_kwargs)

    return sample


def generate(model: Any, stack: Stack, prompt: Prompt, emit: Emit, ask: Ask) -> Tensor:
    """The new token ids (T,) of one text, special ones included; ``emit`` hears of them before.

    With beam search tokens are known at the end only: ``emit`` is called with none. Raises
    ModelError where the library refuses.
    """
    settings, seed = _settings(model, prompt.settings_json)
    beams = settings.num_beams or 1
    common: dict[str, Any] = {
        "generation_config": settings,
        "stopping_criteria": StoppingCriteriaList([_Watch(emit, beams)]),
    }
    if settings.do_sample:
        if beams > 1:
            raise ModelError("num_beams must be 1 where texts are sampled: set one of the two")
        common["custom_generate"] = _sampling(seed)
    kinds = ValueError, IndexError, TypeError, RuntimeError
    with refusing("the edge cannot generate", kinds):
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
    hears = stack.family.input_name == "input_features"
    return output[0, 0 if hears else 1 :]  # a model that hears leaves out its first tokens


def _continue(model: Any, stack: Stack, prompt: Prompt, ask: Ask, common: dict[str, Any]) -> Tensor:
    assert prompt.input_ids is not None
    cache = TopCache(model.config, stack.first_block, stack.stop_block)
    token = FEEDING.set(Feed(ask=ask, cache=cache, prompt_BTD=prompt.hidden_BTD))
    try:
        output: Tensor = model.generate(
            prompt.input_ids,
            attention_mask=torch.ones_like(prompt.input_ids),
            past_key_values=cache,
            **common,
        )
    finally:
        FEEDING.reset(token)
    return output[0, prompt.input_ids.shape[1] :]


def _settings(model: Any, text: str) -> tuple[GenerationConfig, int]:
    """How to generate one text, and its seed; the model's own settings where none came."""
    with refusing("generation settings cannot be read", (ValueError, TypeError, AttributeError)):
        values = json.loads(text) if text else model.generation_config.to_dict()
        seed = int(values.pop(SEED, 0))
        settings = GenerationConfig.from_dict({**values, **_OWN_WAY})
    for key in _FURTHER_PASSES:
        if getattr(settings, key, None) not in (None, 1):
            raise ModelError(
                f"generation with {key} runs the model in ways that a cut one cannot: remove it "
                "from generation_config.json"
            )
    return settings, seed
