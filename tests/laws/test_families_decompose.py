"""Every family and task of the app obeys the law of decomposition."""

from __future__ import annotations

import pytest

from collapipe_flwr.models.decomposition import find_means, make_up_batch
from collapipe_flwr.models.splitter import Splitter
from tests.models.conftest import Tiny
from tests.thorough import few

TASKS = {
    **dict.fromkeys(("marian", "bart", "mbart", "m2m_100", "t5", "mt5", "pegasus"), "seq2seq"),
    **dict.fromkeys(("vit", "beit", "clip", "siglip"), "image-classification"),
    **dict.fromkeys(("bert", "roberta", "electra", "modernbert"), "masked-lm"),
    **dict.fromkeys(("distilbert", "deberta-v2"), "token-classification"),
    **dict.fromkeys(("gpt2", "llama", "mistral", "bloom", "mixtral", "mamba2"), "causal-lm"),
    **dict.fromkeys(("qwen2", "gemma", "opt"), "sequence-classification"),
    "whisper": "seq2seq",
}


USUAL = ("marian", "vit", "bert", "distilbert", "gpt2", "qwen2", "whisper")


@pytest.mark.parametrize(
    "model_type",
    [*USUAL, *few(t for t in TASKS if t not in USUAL)],
)
def test_a_family_may_be_cut_by_its_labels(model_type: str) -> None:
    splitter = Splitter(Tiny().spec(model_type, TASKS[model_type]))
    found = find_means(splitter, splitter.initial_weights(seed=1), make_up_batch(splitter))
    assert found is not None and found.weight == "labels"
